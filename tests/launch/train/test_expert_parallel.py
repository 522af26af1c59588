"""Experts divided over ranks (``--expert-parallel``): as without, checkpoints in and out,
refusals.
"""

import functools

import pytest
import torch

from coat_dist import CoatConfigError
from launch import convert_hf, to_universal
from launch.convert.sources import open_weights
from tests.launch.pretrain_runs import FP32_GRADIENTS, command, configuration, losses, rank_main
from tests.support import run_ranks

EXPERTS = [
    "num_moe_experts=4",
    "moe_ffn_hidden_size=128",
    "moe_aux_loss_coeff=0.01",
    "hidden_dropout=0.0",
]


def weights_after(rank, world, argv, own_experts=False, first=False):
    """How a run ended, and this rank's parameters by their names in the whole model.

    Args:
        first: the parameters before the first step.
        own_experts: tokens of rank r go to experts r, r + 2, ..., so that no gradient of an expert
            is a sum over ranks.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from coat_dist.checkpoint.names import names_in_whole
    from launch import pretrain
    from launch.train import pretrain_options, runtime
    from megatron_patches import unpatch_model

    gating = TopKRouter.gating

    def to_own(self, inputs):
        logits = gating(self, inputs)
        others = torch.arange(logits.shape[-1]) % 2 != rank % 2
        return logits.masked_fill(others, -1e4)

    def held(engine):
        names = names_in_whole(engine)
        return {names[p]: p.detach().clone() for p in engine.module.parameters()}

    device, seen = runtime.start(rank), {}

    def watch(loop):
        seen.update(engine=loop.engine, before=held(loop.engine))

    try:
        TopKRouter.gating = to_own if own_experts else gating
        p = pretrain.plan(pretrain_options.parse(argv), world)
        end = pretrain.train(p, device, interfere=watch)
    except pretrain.USER_ERRORS as problem:
        return str(problem), {}
    finally:
        TopKRouter.gating = gating
    engine = seen["engine"]
    if p.args.expert_parallel > 1:
        with pytest.raises(
            ValueError, match="save_16bit_model: got a model whose experts are divided over ranks"
        ):
            engine.save_16bit_model("nowhere")
    end, found = (
        f"{end}; {engine.coat_patch_report.notes}",
        seen["before"] if first else held(engine),
    )
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
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {}),
        pytest.param(1, FP32_GRADIENTS, marks=pytest.mark.slow),
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
    whole, found = ranks[0][1], set()
    for rank, (end, held) in enumerate(parts):
        assert (
            end.startswith("finished 2 steps")
            and "tokens travel to experts of other ranks in FP8" in end
        )
        experts = {
            int(name.split("local_experts.")[1][0]) for name in held if "local_experts" in name
        }
        assert experts == {2 * rank, 2 * rank + 1}
        for name, weight in held.items():
            assert torch.equal(weight, whole[name]), name
        found |= held.keys()
    assert found == whole.keys()


def close(numbers):
    return [pytest.approx(pair, rel=1e-2) for pair in numbers]


@pytest.mark.slow
def test_tokens_of_all_ranks_and_clipping(work, tmp_path):
    """Sums over ranks in another order: as without, but for rounding. Two of four ranks hold each
    expert, or all four share every layer by two.
    """
    config = settings(tmp_path, 2, gradient_clipping=0.5)
    _, steps = trained(work, tmp_path / "whole", config, world=4)
    ranks, divided = trained(work, tmp_path / "divided", config, "--expert-parallel", 2, world=4)
    assert divided[0][1] == steps[0][1] and [s[1:3] for s in divided] == close(
        [s[1:3] for s in steps]
    )
    held = [weights for _, weights in ranks]
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(held[one][name], held[other][name]) for name in held[one])
    for activation in ({"expert_dispatch": "bf16"}, {"expert_dispatch_grad": "fp8"}):
        other = settings(tmp_path, 2, activation, gradient_clipping=0.5)
        ranks, found = trained(
            work, tmp_path / str(activation), other, "--expert-parallel", 2, world=4
        )
        assert ("in FP8" in ranks[0][0]) == ("expert_dispatch" not in activation)
        assert found[0][1] == steps[0][1] and [s[1:3] for s in found] == close(
            [s[1:3] for s in divided]
        )
    tensor = ("--tensor-parallel", 2, "--sequence-parallel")
    _, steps = trained(work, tmp_path / "tensor", config, *tensor, world=4)
    _, divided = trained(work, tmp_path / "both", config, *tensor, "--expert-parallel", 2, world=4)
    assert [s[1:3] for s in divided] == close([s[1:3] for s in steps])


@pytest.mark.slow
@pytest.mark.parametrize("model", [(), ("moe_grouped_gemm=true",)])
def test_checkpoints_convert(work, tmp_path, model):
    """To other numbers of ranks, and to Hugging Face's layout, from which a run starts with the
    same weights.
    """
    trained = functools.partial(globals()["trained"], model=model)
    config, save, parallel = settings(tmp_path, 2), tmp_path / "save", ("--expert-parallel", 2)
    _, steps = trained(work, tmp_path / "straight", config, *parallel, steps=4)
    before, _ = trained(
        work, tmp_path / "before", config, *parallel, "--save", save, "--stop-at-step", 2, steps=4
    )
    argv = command(
        work, tmp_path / "x", config, "--load", save, "--model-override", *EXPERTS, *model, steps=4
    )
    refused = run_ranks(2, rank_main, argv)[0]
    assert "parallel.expert" in refused and "launch/to_universal.py" in refused

    assert to_universal.main(["--load", str(save), "--output", str(tmp_path / "universal")]) == 0
    for ranks, ep in ((2, 2), (2, 1), (1, 1)):
        more = ("--load", tmp_path / "universal", "--expert-parallel", ep)
        _, found = trained(work, tmp_path / f"{ranks}-{ep}", config, *more, world=ranks, steps=4)
        assert [step for step, *_ in found] == [3, 4]
        assert ranks == 1 or found[0][1] == steps[2][1]
        if ep == 2:  # moments of experts that are joined in one tensor are rounded anew
            assert [s[:2] for s in found[: 1 if model else 2]] == [
                s[:2] for s in steps[2 : 3 if model else 4]
            ]

    assert convert_hf.main(["--from", str(save), "--to", str(tmp_path / "hf")]) == 0
    weights = open_weights(tmp_path / "hf")
    argv = command(
        work, tmp_path / "new", config, "--init-from", tmp_path / "hf", *parallel, steps=1
    )
    argv[argv.index("--model") : argv.index("--model") + 2] = []
    argv += ["--model-override", "seq_length=32", "hidden_dropout=0.0"]
    started = run_ranks(2, functools.partial(weights_after, first=True), [*argv, *model])
    for (_, one), (_, other) in zip(before, started, strict=True):
        assert one.keys() == other.keys()
        for name, weight in one.items():
            # Without padding.
            rows = slice(0, 250) if "embedding" in name or "output" in name else slice(None)
            assert torch.equal(weight[rows], other[name][rows]), name
            assert model or torch.equal(weight[rows], weights.read(name)[rows]), name


@pytest.mark.parametrize(
    ("given", "stage", "model", "told"),
    [
        (
            3,
            2,
            EXPERTS,
            r"--expert-parallel: got 3, accepted: a divisor of model.num_moe_experts \(4\)",
        ),
        (2, 3, EXPERTS, "zero_optimization.stage: got 3, accepted: 1 or 2 with expert parallelism"),
        (
            2,
            2,
            ["num_layers=2"],
            "--expert-parallel: got 2, accepted: a divisor of model.num_moe_experts .1. and of",
        ),
    ],
)
def test_what_cannot_be_run_is_named(work, tmp_path, given, stage, model, told):
    from launch.train import pretrain_options
    from launch.train.plan import plan

    argv = command(
        work,
        tmp_path,
        settings(tmp_path, stage),
        "--expert-parallel",
        given,
        "--model-override",
        *model,
    )
    with pytest.raises(CoatConfigError, match=told):
        plan(pretrain_options.parse(argv), 2)
