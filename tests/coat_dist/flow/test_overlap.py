"""Products part by part, as rows come from other ranks or go to them, are the products that
collectives around a whole one give: to the bit. Files stand in for memory that GPUs read
from each other (``test_peer_memory.py``).
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coat_dist.config import ActivationConfig
from coat_dist.flow import Heads, Norm, TensorParallel, linear, mlp, norm_mlp, norm_qkv, rope_table
from coat_dist.flow.parallel.overlap import Rows, scattered_product
from coat_dist.flow.parallel.peer_memory import PeerMemory, check_switch
from coat_dist.formats import QuantizedTensor
from coat_dist.ops import scaled_mm
from tests.support import equal, run_ranks

from .test_peer_memory import CPU, B, F, H, Machine, through

S = 8


class Counted(PeerMemory):
    """Also counts the bytes that come from other ranks."""

    bytes = 0

    def fetch(self, sizes, wanted):
        for rank, parts in wanted.items():
            if rank != self.rank:
                self.bytes += sum(out.nbytes for out in parts.values())
        return super().fetch(sizes, wanted)


def layer(tp, config, dtype, seed):
    """Outputs and gradients of every kind of block."""
    generator = torch.Generator().manual_seed(seed * tp.size + tp.rank)

    def made(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x, gain = made(S // tp.size, B, H), torch.linspace(0.5, 1.5, H).to(dtype).requires_grad_()
    weights = (
        made(H, H),
        made(H, H // 2),
        made(F, H),
        made(H, F // 2),
        made(F // 2, H),
        made(H, F // 2),
    )
    norm = Norm("rmsnorm", 1e-5, gain, reduce_grad=True)
    table = rope_table(
        torch.linspace(0, 3, S)[:, None, None, None].expand(S, 1, 1, H // 4).contiguous()
    )
    q, k, v = norm_qkv(x, norm, weights[0], None, Heads(1, 2, H // 4), table, tp, config)
    y = (
        linear(
            (q.flatten(2) * torch.cat([k, v], -1).flatten(2)).contiguous(), weights[1], tp, config
        )
        + x
    )
    y = norm_mlp(y, norm, weights[2], weights[3], "swiglu", tp, config) + y
    y = mlp(y, weights[4], weights[5], "gelu", tp, config) + y
    grads = torch.autograd.grad(y.square().sum(), [x, gain, *weights])
    return [y.detach(), *grads]


def both(rank, world, changes, folder):
    """Of each dtype: whether results are the same with rooms and collectives; bytes fetched."""
    tp, config, found = TensorParallel(dist.group.WORLD, True), ActivationConfig(**changes), {}
    with Machine(folder).here():
        for dtype in (torch.bfloat16, torch.float32):
            peers, same = Counted(dist.group.WORLD, CPU), []
            for seed in range(3):
                plain = layer(tp, config, dtype, seed)
                with through(peers):
                    same.append(equal(layer(tp, config, dtype, seed), plain))
            found[dtype] = same, peers.bytes
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"forward_scales": "tensor"},
        {"forward_scales": "tensor", "grad_format": "e5m2", "fp8_gather": False},
    ],
)
def test_scattered_product_of_parts_is_the_whole(changes, tmp_path) -> None:
    for found in run_ranks(2, both, changes, str(tmp_path)):
        assert all(same == [True] * 3 for same, _ in found.values())
        if not changes:
            rows = S // 2 * B
            gathered = 3 * (rows * H + 4 * rows)  # with scales, and in forward alone
            assert found[torch.bfloat16][1] == 3 * (gathered + 3 * rows * H * 2)


def four(rank, world, folder):
    """On four ranks, with numbers whose sums are exact: what of rows that come and of sums that
    go is wrong.
    """
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(rank)
    tp = TensorParallel(group, True)

    def ones(rows):
        codes = torch.randint(-1, 2, (rows, H), generator=generator).to(torch.float8_e4m3fn)
        return QuantizedTensor(codes, torch.ones(rows, 1), "row")

    a, b, own = ones(16), ones(H), ones(4)
    own.top = torch.full((), torch.inf)  # of this rank's rows, so not of all
    wrong = []
    with Machine(folder).here():
        rooms = PeerMemory(group, CPU)
        for dtype in (torch.bfloat16, torch.float32):

            def product(part, out, dtype=dtype):
                scaled_mm(part, b, dtype, out=out)

            expected = tp.reduce_scatter_rows(scaled_mm(a, b, torch.float32)).to(dtype)
            got = scattered_product(rooms, a, product, H, dtype).wait()
            wrong += [dtype] * (not torch.equal(got, expected) or got.dtype != dtype)
            whole = tp.start_gather_quantized(own).wait()
            rows = Rows(rooms, own)
            wrong += ["rows"] * (
                not torch.equal(rows.multiply(product, H, dtype), scaled_mm(whole, b, dtype))
            )
            wrong += ["top"] * any(q.top is not None for q in (whole, rows.whole()))
            wrong += ["codes"] * (
                not torch.equal(rows.whole().codes.view(torch.uint8), whole.codes.view(torch.uint8))
            )
    return wrong


def test_blocks_on_four_ranks_with_peer_memory(tmp_path) -> None:
    assert run_ranks(4, four, str(tmp_path)) == [[]] * 4


def switched(rank, world, values):
    """What every rank says to ``COAT_PEER_MEMORY`` with these values."""
    with mock.patch.dict("os.environ", {"COAT_PEER_MEMORY": values[rank]}):
        try:
            check_switch(dist.group.WORLD)
        except ValueError as error:
            return str(error)
    return None


def switches(rank, world):
    return [
        switched(rank, world, values)
        for values in (("1", "1"), ("0", "0"), ("1", "0"), ("no", "no"))
    ]


def test_check_switch_that_differs_between_ranks() -> None:
    end = "accepted: 0 or 1 (the default), the same on all ranks"
    wrong = [
        f"COAT_PEER_MEMORY: got {a!r} on tensor-parallel rank {r} and {b!r} on rank 0, {end}"
        for a, r, b in (("0", 1, "1"), ("no", 0, "no"))
    ]
    assert run_ranks(2, switches) == [[None, None, *wrong]] * 2
