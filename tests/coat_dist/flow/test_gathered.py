"""Weights in shards: what ranks quantize and gather is what quantizing the whole weight gives,
to the bit.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from coat_dist.formats import E4M3, E5M2
from tests.coat_dist.ops.agreement import compare, same
from tests.support import run_ranks, slow

SHAPES = [(48, 32), (7, 16), (5, 48), (1, 16), (64, 16), (3, 1000)]
"""Shards of whole rows, shards that begin and end inside of rows, fewer rows than ranks, padding
at the end.
"""


def weights_of(dtype):
    generator = torch.Generator("cpu").manual_seed(1)
    found = []
    for i, shape in enumerate(SHAPES):
        w = torch.randn(shape, generator=generator, device="cpu")
        w *= torch.logspace(-6, 4, shape[0], base=8, device="cpu")[:, None]
        w[0] = 0
        if i == 0:
            w[3, 5], w[9, 31], w[20, 0] = torch.nan, torch.inf, -torch.inf
            w[30] = 1e-40
        found.append(w.to(dtype).to(torch.get_default_device()))
    return found


def check_gathered(rank, world):
    from coat_dist.flow.parallel.gathered import Shard, gather
    from coat_dist.ops import amax, quantize_rows, quantize_tensor, tensor_scale

    for dtype in (torch.bfloat16, torch.float32):
        for fmt in (E4M3, E5M2):
            for together in (weights_of(dtype), weights_of(dtype)[1:2]):
                shards, expected = [], []
                for w in together:
                    room = -(-w.numel() // world)
                    first = min(rank * room, w.numel())
                    for layout in ("row", "tensor"):
                        shards.append(
                            Shard(w.reshape(-1)[first : first + room], first, room, w.shape, layout)
                        )
                        scale = tensor_scale(amax(w), fmt, aligned=True)
                        rows = layout == "row"
                        expected.append(
                            quantize_rows(w, fmt, True) if rows else quantize_tensor(w, fmt, scale)
                        )
                found = gather(shards, fmt, dist.group.WORLD).wait()
                for q, e in zip(found, expected, strict=True):
                    same(q.codes, e.codes)
                    compare(q.scales, e.scales)
                    assert q.layout == e.layout
                    # cuBLASLt takes no other addresses.
                    assert q.scales.storage_offset() % 4 == 0


@pytest.mark.parametrize("world", [3, slow(4)])
def test_gather_gives_the_codes_of_the_whole_weight(world):
    run_ranks(world, check_gathered)
