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
from tests.support import run_ranks

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
