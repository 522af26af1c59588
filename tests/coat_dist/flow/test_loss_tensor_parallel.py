"""linear_cross_entropy on two tensor-parallel ranks, with and without sequence parallelism,
against one rank.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from coat_dist.flow import TensorParallel, linear_cross_entropy
from tests.support import residuals_apart, run_ranks

S, B, H, V = 8, 3, 48, 160
ONE = TensorParallel()
CASES = list(
    itertools.product(
        [torch.float32, torch.bfloat16], [False, True], [False, True], [None, 24], [0.0, 1e-2]
    )
)


def train(leaves, labels, upstream, tp, **options):
    """Loss and gradients of this rank's shards: x, weight, bias."""
    x, weight, bias = leaves
    x = (x.chunk(tp.size)[tp.rank] if tp.sharded else x).clone().requires_grad_()
    weight, bias = (t.chunk(tp.size)[tp.rank].clone().requires_grad_() for t in (weight, bias))
    out = linear_cross_entropy(x, weight, labels, tp, bias=bias, **options)
    return [out.detach(), *torch.autograd.grad(out, [x, weight, bias], upstream)]


def compare(dtype, sp, exact, chunk, z_loss):
    """(equal to the bit, relative error) of loss, dx, dweight and dbias against one rank."""
    tp = TensorParallel(dist.group.WORLD, sp)
    leaves = [torch.randn(S, B, H), 2 * torch.randn(V, H) * H**-0.5, torch.randn(V)]
    leaves, labels, upstream = (
        [t.to(dtype) for t in leaves],
        torch.randint(0, V, (S, B)),
        torch.randn(S, B),
    )
    labels[1, 1] = -100
    options = {"exact": exact, "chunk": chunk, "z_loss": z_loss}
    alone, together = (train(leaves, labels, upstream, t, **options) for t in (ONE, tp))
    parts = [
        alone[0],
        alone[1].chunk(2)[tp.rank] if sp else alone[1],
        *(t.chunk(2)[tp.rank] for t in alone[2:]),
    ]
    return [
        (torch.equal(a, b), ((a.double() - b.double()).norm() / b.double().norm()).item())
        for a, b in zip(together, parts, strict=True)
    ]


def nan_anywhere(rank):
    """A weight of rank 1 is NaN: every token's loss is, on both ranks."""
    weight = torch.randn(V // 2, H)
    if rank == 1:
        weight[5] = torch.nan
    labels = torch.zeros(S, B, dtype=torch.long)
    return (
        linear_cross_entropy(torch.ones(S, B, H), weight, labels, TensorParallel(dist.group.WORLD))
        .isnan()
        .all()
    )


def everything(rank, world, seed):
    torch.manual_seed(seed)
    results = {case: compare(*case) for case in CASES}
    torch.manual_seed(seed)
    return results, bool(nan_anywhere(rank))


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, everything, random.randrange(2**31))


def test_linear_cross_entropy_exact_has_the_same_bits_on_any_number_of_ranks(ranks):
    for results, _ in ranks:
        for (dtype, sp, exact, *rest), values in results.items():
            if exact:
                assert all(equal for equal, _ in values), (dtype, sp, rest, values)


def test_linear_cross_entropy_on_ranks_differs_by_the_rounding_of_dx(ranks):
    """dx is rounded to its dtype once a rank and summed. All else is the same work on columns of
    the same product.
    """
    for results, _ in ranks:
        for (dtype, sp, exact, *rest), values in results.items():
            if not exact:
                bounds = (1e-6, 1e-2 if dtype == torch.bfloat16 else 1e-6, 1e-5, 1e-5)
                assert all(
                    error <= bound for (_, error), bound in zip(values, bounds, strict=True)
                ), (dtype, sp, rest)
                assert dtype != torch.bfloat16 or (values[0][0] and values[2][0])


def test_linear_cross_entropy_with_nan_on_one_rank(ranks):
    assert all(nan for _, nan in ranks)


def deepspeed_losses(rank, world, stage, tied):
    import deepspeed

    from coat_dist.config import ActivationConfig
    from coat_dist.flow.blocks import loss
    from megatron_patches import (
        MPUAdapter,
        initialize_model_parallel,
        install_replicated_grad_hooks,
        patch_model,
    )
    from tests.megatron_patches.tiny import tiny_batch, tiny_gpt

    loss._BLOCK = 2 * 32 * 128
    initialize_model_parallel(1)
    model = tiny_gpt(gpt={"share_embeddings_and_output_weights": tied})
    patch_model(model, ActivationConfig())
    install_replicated_grad_hooks(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config,
        mpu=MPUAdapter(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
    )
    losses = []
    for step in range(6):
        tokens, labels, positions = tiny_batch(world * step + rank)
        mean = engine(tokens, positions, None, labels=labels).mean()
        engine.backward(mean)
        engine.step()
        losses.append(mean.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(tokens, positions, None, labels=labels).mean().item())
    return losses


def losses_apart(*arguments):
    with residuals_apart():
        return deepspeed_losses(*arguments)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_linear_cross_entropy_under_zero_3(tied):
    """ZeRO-3's hooks leave the residual's gradient to autograd; so does the run to compare with."""
    runs = [
        run_ranks(2, run, stage, tied) for stage, run in ((3, deepspeed_losses), (2, losses_apart))
    ]
    for losses, reference in zip(*runs, strict=True):
        assert losses == pytest.approx(reference, rel=2e-3) and losses[-1] < losses[0]
