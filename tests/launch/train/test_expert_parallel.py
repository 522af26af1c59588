"""Experts divided over ranks (``--expert-parallel``): as without, checkpoints in and out,
refusals.
"""

import functools
from unittest import mock

import pytest
import torch

from coat_dist.checkpoint.names import divided_experts, info_of
from launch.convert.sources import open_weights
from tests.launch.convert.hf_folders import convert
from tests.launch.convert.weight_runs import without_model
from tests.launch.pretrain_runs import (
    FP32_GRADIENTS,
    command,
    configuration,
    held,
    losses,
    run_with,
    weights_of,
)
from tests.support import equal, run_ranks, slow

EXPERTS = [
    "num_moe_experts=4",
    "moe_ffn_hidden_size=128",
    "moe_aux_loss_coeff=0.01",
    "hidden_dropout=0.0",
]


def weights_after(rank, world, argv, own_experts=False):
    """How a run ended, and its weights, of this rank by their names in the whole model.

    Args:
        own_experts: tokens of rank r go to experts r, r + 2, ..., so that no gradient of an expert
            is a sum over ranks.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_patches import unpatch_model

    gating = TopKRouter.gating

    def to_own(self, inputs):
        logits = gating(self, inputs)
        others = torch.arange(logits.shape[-1]) % 2 != rank % 2
        return logits.masked_fill(others, -1e4)

    kept = []
    with mock.patch.object(TopKRouter, "gating", to_own if own_experts else gating):
        end = run_with(rank, world, argv, lambda loop: kept.append(loop.engine))
    (engine,) = kept
    if divided_experts(info_of(engine))[1]:
        with pytest.raises(
            ValueError, match="save_16bit_model: got a model whose layers or experts are"
        ):
            engine.save_16bit_model("nowhere")
    end, found = f"{end}; {engine.coat_patch_report.notes}", held(engine)
    unpatch_model(engine.module)
    kinds = {type(layer.mlp.token_dispatcher).__name__ for layer in engine.module.decoder.layers}
    # Megatron's own again.
    assert kinds <= {"MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher"}
    return end, found


def trained(work, run, config, *more, world=2, steps=3, model=(), **how):
    argv = command(work, run, config, *more, "--model-override", *EXPERTS, *model, steps=steps)
    return run_ranks(world, functools.partial(weights_after, **how), argv), losses(run)


def settings(tmp_path, stage, activation=None, **more):
    """Moments rounded to nearest: noise goes by the order of parameters, which differs where
    experts stand apart.
    """
    coat = {"optimizer": {"stochastic_rounding": False}, "activation": activation or {}}
    return configuration(tmp_path, stage, coat=coat, **more)


@pytest.mark.parametrize(
    ("stage", "sums"),
    [
        slow(1, {}),
        (2, {}),
        slow(1, FP32_GRADIENTS),
    ],
)
def test_divided_experts_train_as_whole_ones_to_the_bit(work, tmp_path, stage, sums):
    """Losses and all weights after two steps, of each expert where it is; norms but for the
    order of sums.
    """
    config = settings(tmp_path, stage, gradient_clipping=0.0, **sums)
    runs = {
        ep: trained(
            work, tmp_path / str(ep), config, "--expert-parallel", ep, own_experts=True, steps=2
        )
        for ep in (1, 2)
    }
    (ranks, steps), (parts, divided) = runs[1], runs[2]
    assert [loss for _, loss, *_ in divided] == [loss for _, loss, *_ in steps]
    assert [norm for *_, norm, _ in divided] == pytest.approx(
        [norm for *_, norm, _ in steps], rel=1e-6
    )
    for rank, (end, weights) in enumerate(parts):
        assert (
            end.startswith("finished 2 steps")
            and "tokens travel to experts of other ranks in FP8" in end
        )
        experts = {
            int(name.split("local_experts.")[1][0]) for name in weights if "local_experts" in name
        }
        assert experts == {2 * rank, 2 * rank + 1}
    (_, whole), (_, one), (_, other) = ranks[0], *parts
    assert equal(one | other, whole) and equal(other | one, whole)


def close(numbers):
    return [pytest.approx(pair, rel=1e-2) for pair in numbers]


SHARED = ("--tensor-parallel", 2, "--sequence-parallel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "shared"),
    [
        ({}, ()),
        ({"expert_dispatch": "bf16"}, ()),
        ({"expert_dispatch_grad": "fp8"}, ()),
        ({}, SHARED),
    ],
)
def test_divided_experts_of_four_ranks_train_as_whole_ones(work, tmp_path, activation, shared):
    """Sums over ranks in another order: as without, but for rounding. Two of four ranks hold each
    expert, or all four share every layer by two.
    """
    config = settings(tmp_path, 2, activation, gradient_clipping=0.5)
    _, steps = trained(work, tmp_path / "whole", config, *shared, world=4)
    parts = ("--expert-parallel", 2, *shared)
    ranks, divided = trained(work, tmp_path / "divided", config, *parts, world=4)
    assert [s[1:3] for s in divided] == close([s[1:3] for s in steps])
    if not shared:
        assert ("in FP8" in ranks[0][0]) == ("expert_dispatch" not in activation)
        assert divided[0][1] == steps[0][1]
        weights = [of_rank for _, of_rank in ranks]
        assert equal(weights[:2], weights[2:])


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ("moe_grouped_gemm=true",)])
def test_convert_hf_joins_divided_experts(work, tmp_path, model):
    """A run that starts from the folder begins with the weights that were saved."""
    config, parallel = settings(tmp_path, 2), ("--expert-parallel", 2)
    save = ("--save", tmp_path / "save")
    saved, _ = trained(work, tmp_path / "run", config, *parallel, *save, model=model, steps=1)
    convert(tmp_path / "save", tmp_path / "hf")
    weights = open_weights(tmp_path / "hf")
    new = ("--init-from", tmp_path / "hf", *parallel)
    argv = without_model(command(work, tmp_path / "new", config, *new, steps=1))
    argv += ["--model-override", "seq_length=32", "hidden_dropout=0.0", *model]
    for (_, one), (_, begun, _) in zip(saved, run_ranks(2, weights_of, argv), strict=True):
        assert one.keys() == begun.keys()
        for name, weight in one.items():
            # Without padding.
            rows = slice(0, 250) if "embedding" in name or "output" in name else slice(None)
            assert torch.equal(weight[rows], begun[name][rows]), name
            assert model or torch.equal(weight[rows], weights.read(name)[rows]), name
