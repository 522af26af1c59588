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

import megatron_patches as mp
from coat_dist.config import CoatConfigError
from coat_dist.config import OptimizerConfig as Moments
from megatron_patches.compat import older_than
from megatron_patches.parallel.optimizer import _check_tied
from tests.support import equal, run_ranks, saves_by_dist_checkpointing

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


def _train_and_resume(folder, kinds, tp=1, **model):
    """A run and its losses. What it saved in each format goes on to the bit."""
    with saves_by_dist_checkpointing():
        start(tp)
        run = Run(COAT, model)
        losses = run.train(range(SAVED_AFTER))
        saved = run.bytes()
        for kind in kinds:
            run.save(folder / kind, kind)
        rest = run.train(range(SAVED_AFTER, STEPS))
        end = run.bytes()
        for kind in kinds:
            again = Run(COAT, model)
            again.load(folder / kind, kind)
            assert equal(again.bytes(), saved), kind
            assert again.train(range(SAVED_AFTER, STEPS)) == rest, kind
            assert equal(again.bytes(), end), kind
    return run, losses + rest


def _trained(rank, world, folder):
    run, losses = _train_and_resume(folder, ["torch", DIST])
    adamw = Run().train(range(STEPS))
    assert losses != adamw and losses == pytest.approx(adamw, rel=0.02)
    assert losses[-1] < losses[0]

    # Without codes, and with other formats: moments in fp32 carry on.
    rounded = Run({"coat": {}})
    rounded.load(folder / DIST, DIST, coat_codes=False)
    other = Run({"coat": {"optimizer": {"first_moment": "int8", "second_moment": "log8"}}})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load(folder / DIST, DIST)
    assert sum("rounded again" in str(w.message) for w in warned) == 1
    for again in (rounded, other):
        carried = again.train(range(SAVED_AFTER, STEPS))
        assert carried != losses[SAVED_AFTER:]
        assert carried == pytest.approx(losses[SAVED_AFTER:], rel=0.02)

    # Both ranks together hold each weight's moments once, in little more than two bytes.
    inner, held, coded = run.inner(), 0, 0
    kinds = {(group["wd_mult"], group["moments"]) for group in inner.param_groups}
    assert kinds == {(1.0, "fp8"), (0.0, "fp32")}
    for group in inner.param_groups:
        for p in group["params"] if group["moments"] == "fp8" else ():
            assert "exp_avg" not in inner.state[p]
            coded += p.numel()
            held += sum(t.nbytes for t in inner.state[p].values() if torch.is_tensor(t))
    both = torch.tensor([held, coded])
    dist.all_reduce(both)
    assert both[1] == sum(p.numel() for p in run.model.parameters() if p.dim() > 1)
    assert 2.0 < both[0] / both[1] < 2.1
    return losses[0]


def _alone(rank, world, folder, first):
    """One rank goes on where two have stopped: it has no codes for its shards, and rounds moments
    again.
    """
    start()
    run = Run(COAT)
    run.load(folder / DIST, DIST, coat_codes=False)
    assert run.inner().steps() == SAVED_AFTER and run.train(range(1))[0] < 0.9 * first


def test_get_megatron_optimizer_follows_adamw_in_fp8_shards_and_resumes(tmp_path):
    first, _ = run_ranks(2, _trained, tmp_path)
    run_ranks(1, _alone, tmp_path, first)


def _of_others(rank, world, folder, tp, kinds, model):
    """Also Megatron's own AdamW takes over such a checkpoint, where it can load any without
    Transformer Engine.
    """
    _, losses = _train_and_resume(folder, kinds, tp, **model)
    if not model and not older_than("0.16"):
        plain = Run()
        plain.train(range(1))  # AdamW's places in a checkpoint exist after a step
        plain.load(folder / "dp_reshardable", "dp_reshardable")
        carried = plain.train(range(SAVED_AFTER, STEPS))
        assert carried == pytest.approx(losses[SAVED_AFTER:], rel=0.02)


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
def test_get_megatron_optimizer_resumes_other_formats_and_models(tmp_path, tp, kinds, model):
    run_ranks(2, _of_others, tmp_path, tp, kinds, model)


def _in_megatrons_passes(rank, world):
    """Steps are to the bit those that clip and write weights in passes of their own. Megatron
    clips to what is above 0.
    """
    start()
    for clip_grad in (0.5, -1.0):
        ours, theirs = Run(COAT, clip_grad=clip_grad), Run(COAT, clip_grad=clip_grad)
        for optimizer in theirs.optimizer.chained_optimizers:
            optimizer.optimizer.copies = {}
        theirs.optimizer.__class__ = ChainedOptimizer
        for run in (ours, theirs):
            run.train(range(3))
        assert equal(ours.bytes(), theirs.bytes())
        norm = ours.optimizer.get_grad_norm()
        assert norm > 0.6 and ours.optimizer._norm().item() == pytest.approx(norm, rel=1e-12)


def test_step_is_that_of_megatrons_passes():
    run_ranks(2, _in_megatrons_passes)


def _with_a_frozen_stage(rank, world):
    """Whether a step was taken, and the norm: the second pipeline stage has nothing to train,
    and takes part.
    """
    start(pipeline_model_parallel_size=2)
    run = Run(COAT, {"pipeline_model_parallel_size": 2}, frozen=rank == 1)
    for buffer in run.model.buffers:
        buffer.grad_data.fill_(1.0)
    return run.optimizer.step()[:2]


def test_step_of_a_stage_without_trained_parameters():
    first, frozen = run_ranks(2, _with_a_frozen_stage)
    assert first == frozen and first[0] and first[1] > 1


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
        mp.get_megatron_optimizer(run.optimizer.config, [run.model], coat=COAT)


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
