"""Rows read from other GPUs' memory are those that NCCL brings, however exchanges follow each
other.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from coat_dist.config import ActivationConfig
from coat_dist.flow import Norm, TensorParallel, linear, norm_linear, norm_mlp
from coat_dist.flow.parallel import peer_memory as module
from coat_dist.flow.parallel.overlap import Rows, rows_of, scattered_product
from coat_dist.flow.parallel.peer_memory import FEWEST, peer_memory
from coat_dist.formats import E4M3
from coat_dist.ops import quantize_rows, scaled_mm
from tests.support import run_ranks
from tests.support.devices import two_gpus

pytestmark = two_gpus

M, H, F = 2048, 1024, 2048


def exchanges(rank, world):
    """Facts about many exchanges in a row, of two kinds and several sizes, without a wait of the
    host.
    """
    group, device = dist.group.WORLD, torch.device("cuda", rank)
    torch.manual_seed(rank)
    peers = peer_memory(group, FEWEST, 1, device)  # rooms grow on the way
    if peers is None:
        return None
    wrong = torch.zeros((), device=device)
    for step in range(60):
        rows, k, n = M * (1 + step % 3), H, F if step % 2 else H
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        w8 = quantize_rows(
            torch.randn(n, k, device=device, dtype=torch.bfloat16), E4M3, aligned=True
        )
        x8 = quantize_rows(x, E4M3, aligned=True)

        def product(part, out, w8=w8):
            scaled_mm(part, w8, torch.bfloat16, True, out)

        coming = Rows(peers, x8)
        got = coming.multiply(product, n, torch.bfloat16)
        codes = torch.empty(world * rows, k, device=device, dtype=torch.uint8)
        scales = torch.empty(world * rows, 1, device=device)
        dist.all_gather_into_tensor(codes, x8.codes.view(torch.uint8))
        dist.all_gather_into_tensor(scales, x8.scales)
        whole = coming.whole()
        wrong += (whole.codes.view(torch.uint8) != codes).sum() + (whole.scales != scales).sum()
        for r in range(world):
            part = slice(r * rows, (r + 1) * rows)
            wrong += (
                scaled_mm(rows_of(whole, r * rows, rows), w8, torch.bfloat16, True) != got[part]
            ).sum()

        pending = scattered_product(peers, x8, product, n, torch.bfloat16)
        torch.mm(x, x.t())
        parts = [
            scaled_mm(rows_of(x8, r * rows // world, rows // world), w8, torch.bfloat16, True)
            for r in range(world)
        ]
        theirs = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(theirs, torch.cat(parts))
        wrong += (pending.wait() != theirs).sum()

    return wrong.item()


def layers(rank, world):
    """Largest relative error of outputs and gradients between both ways, over several passes."""
    module.FEWEST = 1  # for layers as small as these
    tp = TensorParallel(dist.group.WORLD, True)
    config, worst = ActivationConfig(), 0.0
    for seed in range(4):
        found = []
        for way in ("0", "1"):
            os.environ["COAT_PEER_MEMORY"] = way
            torch.manual_seed(seed * world + rank)
            made = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            x, gain = (
                made(M, 2, H).requires_grad_(),
                torch.ones(H, device="cuda", requires_grad=True),
            )
            weights = [(made(*shape) * shape[1] ** -0.5).requires_grad_() for shape in
                       ((H, H), (H, H), (2 * F, H), (H, F))]  # fmt: skip
            norm = Norm("rmsnorm", 1e-5, gain)
            y = (
                linear(norm_linear(x, norm, weights[0], None, tp, config), weights[1], tp, config)
                + x
            )
            y = norm_mlp(y, norm, *weights[2:], "swiglu", tp, config) + y
            grads = torch.autograd.grad(y, [x, gain, *weights], made(*y.shape))
            found.append([y.detach(), *grads])
        for a, b in zip(*found, strict=True):
            worst = max(worst, ((a.double() - b.double()).norm() / a.double().norm()).item())
    return worst


def test_exchanges_bring_the_same_bytes() -> None:
    wrong = run_ranks(2, exchanges, backend="nccl")
    if wrong[0] is None:
        pytest.skip("these GPUs cannot read each other's memory")
    assert wrong == [0.0, 0.0]


def test_layers_are_the_same_up_to_the_order_of_sums() -> None:
    assert max(run_ranks(2, layers, backend="nccl")) < 2e-2
