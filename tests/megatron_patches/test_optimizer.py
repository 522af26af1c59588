"""CoatAdamW inside Megatron's distributed optimizer, on two data-parallel ranks (gloo), without
DeepSpeed.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from torch.utils._pytree import tree_leaves

import megatron_patches as mp
from coat_dist.config import CoatConfigError
from coat_dist.config import OptimizerConfig as Moments
from megatron_patches.compat import older_than
from megatron_patches.parallel.optimizer import _check_config, _check_tied
from tests.support import run_ranks, saves_by_dist_checkpointing

from .tiny import NARROW, labelled_loss, tiny_batch, tiny_gpt
from .training import start

STEPS, SAVED_AFTER = 6, 3
OLD = older_than("0.15")
DIST = "dp_zero_gather_scatter" if OLD else "fully_reshardable"
"""One of Megatron's torch_dist formats; "torch" stands for its files of one rank each. Others of
0.14 need numpy 1.
"""
OTHERS = ["dp_zero_gather_scatter", "dp_reshardable"]
COAT = {"coat": {"optimizer": {"stochastic_rounding": True}}}


class Run:
    """A patched GPT in Megatron's own loop; ``coat`` None: Megatron's AdamW."""

    def __init__(self, coat=None, model=None, patch=True, frozen=False, **options):
        model = tiny_gpt(**NARROW | (model or {})).requires_grad_(not frozen)
        if patch:
            mp.patch_model(model, {"coat": {}})
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.model = DistributedDataParallel(model.config, ddp, model)
        settings = dict(
            optimizer="adam", lr=3e-3, min_lr=0.0, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0
        )
        settings |= dict(bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
        config = OptimizerConfig(**settings | options)
        if coat is None:
            self.optimizer = get_megatron_optimizer(config, [self.model])
        else:
            self.optimizer = mp.get_megatron_optimizer(config, [self.model], coat=coat)

    def train(self, steps):
        losses = []
        for step in steps:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            device = next(self.model.parameters()).device
            loss = labelled_loss(self.model, tiny_batch(2 * step + dist.get_rank(), device))
            loss.backward()
            finalize_model_grads([self.model])
            assert self.optimizer.step()[0]
            losses.append(loss.item())
        return losses

    def inner(self):
        return self.optimizer.chained_optimizers[0].optimizer

    def bytes(self):
        """Everything that the next steps depend on, on this rank."""
        inner = [one.optimizer for one in self.optimizer.chained_optimizers]
        shards = [
            (p.detach(), one.state[p])
            for one in inner
            for group in one.param_groups
            for p in group["params"]
        ]
        return copy.deepcopy((shards, [p.detach() for p in self.model.parameters()]))

    def save(self, folder, kind):
        rank = dist.get_rank()
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        if kind == "torch":
            whole = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(whole, folder / f"model_{rank}.pt")
            self.optimizer.save_parameter_state(_shards(folder))
        else:
            dist_checkpointing.save(self._places(kind, False), str(folder))
        dist.barrier()

    def load(self, folder, kind, **metadata):
        if kind == "torch":
            loaded = torch.load(folder / f"model_{dist.get_rank()}.pt", weights_only=False)
        else:
            loaded = dist_checkpointing.load(self._places(kind, True, **metadata), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        if kind == "torch":
            self.optimizer.load_parameter_state(_shards(folder))

    def _places(self, kind, loading, **metadata):
        weights = self.model.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": kind, **metadata}
        options = {"sharding_type": kind} if older_than("0.15") else {}
        return {
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(
                weights, loading, metadata=metadata, **options
            ),
        }


def _shards(folder):
    """Megatron's file of the shards of one tensor-parallel rank."""
    return str(folder / f"distrib_optim_{parallel_state.get_tensor_model_parallel_rank()}.pt")


def _same(left, right):
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def _train_and_resume(rank, world, folder, kinds, tp=1, **model):
    """Losses of a whole run and what became of it when it was saved and resumed, by format; and
    the run.
    """
    with saves_by_dist_checkpointing():
        start(tp)
        run = Run(COAT, model)
        losses = run.train(range(SAVED_AFTER))
        saved = run.bytes()
        for kind in kinds:
            run.save(folder / kind, kind)
        rest = run.train(range(SAVED_AFTER, STEPS))
        end, resumed = run.bytes(), {}
        for kind in kinds:
            again = Run(COAT, model)
            again.load(folder / kind, kind)
            loaded = again.bytes()
            resumed[kind] = _same(loaded, saved), again.train(range(SAVED_AFTER, STEPS)) == rest
            resumed[kind] += (_same(again.bytes(), end),)
        return losses + rest, resumed, run


def _all(rank, world, folder):
    losses, resumed, run = _train_and_resume(rank, world, folder, ["torch", DIST])
    adamw = Run().train(range(STEPS))
    # Without codes, and with other formats: moments in fp32 carry on.
    rounded = Run({"coat": {}})
    rounded.load(folder / DIST, DIST, coat_codes=False)
    other = Run({"coat": {"optimizer": {"first_moment": "int8", "second_moment": "log8"}}})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load(folder / DIST, DIST)
    said = [str(w.message) for w in warned if "rounded again" in str(w.message)]
    carried = [r.train(range(SAVED_AFTER, STEPS)) for r in (rounded, other)]
    inner = run.inner()
    groups = [
        (g["wd_mult"], g["moments"], {tuple(inner.state[p]) for p in g["params"]})
        for g in inner.param_groups
    ]
    coded = [p for g in inner.param_groups if g["moments"] == "fp8" for p in g["params"]]
    held = sum(
        t.numel() * t.element_size()
        for p in coded
        for t in inner.state[p].values()
        if torch.is_tensor(t)
    )
    counts = (
        held,
        sum(p.numel() for p in coded),
        sum(p.numel() for p in run.model.parameters() if p.dim() > 1),
    )
    return dict(
        adamw=adamw,
        losses=losses,
        resumed=resumed,
        carried=carried,
        said=said,
        groups=groups,
        counts=counts,
    )


def _more(rank, world, folder, tp, kinds, model):
    """Also what Megatron's own AdamW makes of such a checkpoint, where it can load any without
    Transformer Engine.
    """
    losses, resumed, _ = _train_and_resume(rank, world, folder, kinds, tp, **model)
    if model or older_than("0.16"):
        return resumed, losses, losses[SAVED_AFTER:]
    plain = Run()
    plain.train(range(1))  # AdamW's places in a checkpoint exist after a step
    plain.load(folder / "dp_reshardable", "dp_reshardable")
    return resumed, losses, plain.train(range(SAVED_AFTER, STEPS))


def _alone(rank, world, folder):
    start()
    run = Run(COAT)
    run.load(folder, DIST, coat_codes=False)
    return run.inner().steps(), run.train(range(1))


def _in_megatrons_passes(rank, world, clip_grad):
    """Whether steps are to the bit those that clip and write weights in passes of their own; and
    the last norm.
    """
    start()
    ours, theirs = Run(COAT, clip_grad=clip_grad), Run(COAT, clip_grad=clip_grad)
    for optimizer in theirs.optimizer.chained_optimizers:
        optimizer.optimizer.copies = {}
    theirs.optimizer.__class__ = ChainedOptimizer
    for run in (ours, theirs):
        run.train(range(3))
    return (
        _same(ours.bytes(), theirs.bytes()),
        ours.optimizer.get_grad_norm(),
        ours.optimizer._norm().item(),
    )


def _with_a_frozen_stage(rank, world):
    """Whether a step was taken, and the norm: the second pipeline stage has nothing to train,
    and takes part.
    """
    start(pipeline_model_parallel_size=2)
    run = Run(COAT, {"pipeline_model_parallel_size": 2}, frozen=rank == 1)
    for buffer in run.model.buffers:
        buffer.grad_data.fill_(1.0)
    return run.optimizer.step()[:2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    return [{**run, "folder": folder} for run in run_ranks(2, _all, folder)]


def test_get_megatron_optimizer_follows_adamw(runs):
    for run in runs:
        assert run["losses"] != run["adamw"]
        assert (
            run["losses"] == pytest.approx(run["adamw"], rel=0.02)
            and run["losses"][-1] < run["losses"][0]
        )


def test_get_megatron_optimizer_shards_fp8_moments(runs):
    """Both ranks together hold each weight's moments once, in little more than two bytes;
    vectors keep fp32.
    """
    for run in runs:
        assert {(wd, kind) for wd, kind, _ in run["groups"]} == {(1.0, "fp8"), (0.0, "fp32")}
        assert all(
            "exp_avg" not in keys
            for _, kind, states in run["groups"]
            for keys in states
            if kind == "fp8"
        )
    held, mine, whole = (sum(run["counts"][i] for run in runs) for i in range(3))
    assert mine == whole // 2 and 2.0 < held / mine < 2.1


def test_resume_with_codes_to_the_bit_and_without_codes_nearly(runs):
    for run in runs:
        assert run["resumed"] == dict.fromkeys(["torch", DIST], (True, True, True))
        for losses in run["carried"]:
            assert losses != run["losses"][SAVED_AFTER:]
            assert losses == pytest.approx(run["losses"][SAVED_AFTER:], rel=0.02)
        assert len(run["said"]) == 1


@pytest.mark.parametrize("clip_grad", [0.5, -1.0])  # Megatron clips to what is above 0
def test_step_is_that_of_megatrons_passes(clip_grad):
    for same, norm, own in run_ranks(2, _in_megatrons_passes, clip_grad):
        assert same and norm > 0.6 and own == pytest.approx(norm, rel=1e-12)


def test_step_of_a_stage_without_trained_parameters():
    first, frozen = run_ranks(2, _with_a_frozen_stage)
    assert first == frozen and first[0] and first[1] > 1


def test_resume_with_another_number_of_ranks(runs):
    """One rank goes on where two have stopped: it has no codes for its shards, and rounds
    moments again.
    """
    ((steps, losses),) = run_ranks(1, _alone, runs[0]["folder"] / DIST)
    assert steps == SAVED_AFTER and losses[0] < 0.9 * runs[0]["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "kinds", "model"),
    [
        pytest.param(1, OTHERS, {}, marks=pytest.mark.skipif(OLD, reason="needs numpy 1")),
        (2, ["torch", DIST], {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (1, ["torch", DIST], {"num_moe_experts": 2, "moe_ffn_hidden_size": 128}),
    ],
    ids=["formats and AdamW", "TP and SP", "experts"],
)
def test_resume_of_other_formats_and_models(tmp_path, tp, kinds, model):
    for resumed, losses, carried in run_ranks(2, _more, tmp_path, tp, kinds, model):
        assert resumed == dict.fromkeys(kinds, (True, True, True))
        assert carried == pytest.approx(losses[SAVED_AFTER:], rel=0.02)


@pytest.mark.parametrize(
    ("coat", "options", "said"),
    [
        (
            {"coat": {}},
            {"optimizer": "sgd"},
            "optimizer: got 'sgd', accepted with CoatAdamW: 'adam'",
        ),
        (
            {"coat": {}},
            {"use_distributed_optimizer": False},
            "use_distributed_optimizer: got False",
        ),
        (
            {"coat": {"activation": {"forward_scales": "tensor", "bf16_layers": [0]}}},
            {},
            "coat.activation: got a model that is patched already with forward_scales 'row' where "
            "the block says "
            "'tensor', bf16_layers () where the block says (0,); accepted: the same settings, or "
            "an unpatched model",
        ),
        ({"optimizer": {}}, {}, 'coat: got one without a "coat" block'),
        (Moments(master_weights="bf16_remainder"), {}, "coat.optimizer.master_weights"),
        (
            {"coat": {"activation": {"fp8_weight_gather": True}}},
            {},
            "coat.activation.fp8_weight_gather: got true",
        ),
    ],
)
def test_get_megatron_optimizer_refuses(coat, options, said):
    with pytest.raises(CoatConfigError) as caught:
        Run(coat, **options)
    assert said in str(caught.value)


def test_get_megatron_optimizer_refuses_replicated_gradient_hooks():
    run = Run(COAT)
    # As install_replicated_grad_hooks leaves it.
    next(run.model.parameters()).coat_replicated_grad = True
    with pytest.raises(CoatConfigError, match="model_chunks: got replicated-gradient hooks"):
        _check_config(run.optimizer.config, [run.model])


def test_check_tied_refuses_embeddings_that_would_drift(monkeypatch):
    tied, untied = (
        tiny_gpt(gpt={"share_embeddings_and_output_weights": tied}) for tied in (True, False)
    )
    _check_tied([tied], Moments())
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    _check_tied([untied], Moments())
    _check_tied([tied], Moments(stochastic_rounding=False))
    with pytest.raises(
        CoatConfigError, match="^share_embeddings_and_output_weights: got True with pipeline stages"
    ):
        _check_tied([tied], Moments())
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 2)
    with pytest.raises(CoatConfigError, match="on 2 data-parallel ranks"):
        _check_tied([tied], Moments(stochastic_rounding=False))
