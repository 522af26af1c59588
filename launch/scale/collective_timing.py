"""Collectives of the ranks that are here, timed over sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "SIZES", "measure", "share"]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "p2p")
SIZES = {
    "cuda": tuple(2**k for k in range(12, 29, 2)),
    "cpu": tuple(2**k for k in range(12, 23, 2)),
}
"""Bytes: 4 KiB to 256 MiB on GPUs."""
_REPEATS = 5

# torch 2.13 renamed both collectives and deprecated the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(kind: str, ranks: int) -> float:
    """Part of a collective's bytes, those of the whole tensor, that each rank sends, as in a
    ring.
    """
    if kind == "p2p":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def _call(kind: str, size: int, device: torch.device) -> Callable[[], Any]:
    """A collective over ``size`` bytes, as :func:`share` counts them."""
    world = dist.get_world_size()
    count = max(world, size // 4 // world * world)
    whole, part = torch.zeros(count, device=device), torch.zeros(count // world, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "reduce_scatter":
        return lambda: _reduce_scatter(part, whole)
    if kind == "all_gather":
        return lambda: _all_gather(whole, part)
    if kind == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    # There and back between the first and the last rank, which are furthest from each other.
    rank, last = dist.get_rank(), world - 1

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, last)
            dist.recv(whole, last)
        elif rank == last:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return there_and_back


def _timed(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of one call, that of the slowest rank; the median of repeats."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found = []
    for _ in range(_REPEATS):
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        synchronize()
        found.append((time.perf_counter() - began) / times)
    slowest = torch.tensor(statistics.median(found), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(device: torch.device, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """``samples``: seconds of every kind over ``sizes`` bytes."""
    samples = []
    for kind, size in product(KINDS, sorted(sizes) or SIZES[device.type]):
        call = _call(kind, size, device)
        for _ in range(2):
            call()
        ranks, passes = (2, 2) if kind == "p2p" else (dist.get_world_size(), 1)
        took = _timed(call, 4 if device.type == "cpu" or size >= 2**24 else 20, device)
        samples.append({"kind": kind, "ranks": ranks, "size": size, "seconds": took / passes})
    return {"samples": samples}
