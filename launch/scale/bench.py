"""Collectives of the ranks that are here, timed over sizes, alone and beside matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KINDS", "SIZES", "measure", "share"]

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "p2p")
SIZES = {"cuda": tuple(2**k for k in range(12, 29, 2)), "cpu": tuple(2**k for k in range(12, 23, 2))}
"""Bytes: 4 KiB to 256 MiB on GPUs."""
_REPEATS = 5
_BESIDE = 5
"""So many of the largest sizes are also timed beside products."""
_SIDE = {"cuda": 4096, "cpu": 256}
"""Of the matrices that are multiplied beside a collective."""

# torch 2.13 renamed both collectives and deprecated the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def share(kind: str, ranks: int) -> float:
    """Part of a collective's bytes that each rank sends, as in a ring.

    The bytes are those of the whole tensor: what is reduced, what a rank has after a gather or before a scatter, what
    a rank sends to all others together, what one rank sends to another.
    """
    if kind == "p2p":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def _call(kind: str, size: int, device: torch.device) -> Callable[[bool], Any]:
    """A collective over ``size`` bytes, as :func:`share` counts them; the argument is ``async_op``."""
    world = dist.get_world_size()
    count = max(world, size // 4 // world * world)
    whole, part = torch.zeros(count, device=device), torch.zeros(count // world, device=device)
    if kind == "all_reduce":
        return lambda later: dist.all_reduce(whole, async_op=later)
    if kind == "reduce_scatter":
        return lambda later: _reduce_scatter(part, whole, async_op=later)
    if kind == "all_gather":
        return lambda later: _all_gather(whole, part, async_op=later)
    if kind == "all_to_all":
        other = torch.empty_like(whole)
        return lambda later: dist.all_to_all_single(other, whole, async_op=later)
    # There and back between the first and the last rank, which are furthest from each other.
    rank, last = dist.get_rank(), world - 1

    def there_and_back(later: bool) -> Any:
        if rank == 0:
            dist.send(whole, last)
            dist.recv(whole, last)
        elif rank == last:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return there_and_back


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of one call, that of the slowest rank; the median of repeats."""
    found = []
    for _ in range(_REPEATS):
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        _synchronize(device)
        found.append((time.perf_counter() - began) / times)
    slowest = torch.tensor(statistics.median(found), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _times(size: int, device: torch.device) -> int:
    return 4 if device.type == "cpu" or size >= 2**24 else 20


def measure(device: torch.device, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Times of every kind over ``sizes`` bytes, and of some beside products.

    Returns:
        ``samples``, ``overlaps`` and ``missing``, kinds that the backend lacks, with its words.
    """
    samples, overlaps, missing = [], [], {}
    sizes = sorted(sizes) or SIZES[device.type]
    for kind in KINDS:
        try:
            for size in sizes:
                call = _call(kind, size, device)
                for _ in range(2):
                    call(False)
                took = _timed(lambda call=call: call(False), _times(size, device), device)  # type: ignore[misc]
                both_ways = 2 if kind == "p2p" else 1
                ranks = 2 if kind == "p2p" else dist.get_world_size()
                samples.append({"kind": kind, "ranks": ranks, "size": size, "seconds": took / both_ways})
            if kind != "p2p":
                overlaps += [_beside_products(kind, size, device) for size in sizes[-_BESIDE:]]
        except (RuntimeError, NotImplementedError, ValueError) as problem:
            if device.type == "cuda":
                raise
            missing[kind] = str(problem).splitlines()[0]  # of gloo; every rank finds the same
    return {"samples": samples, "overlaps": overlaps, "missing": missing}


def _beside_products(kind: str, size: int, device: torch.device) -> dict[str, Any]:
    """A collective and products that take about as long, each alone and both at once."""
    side, call = _SIDE[device.type], _call(kind, size, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = torch.ones(side, side, dtype=dtype, device=device), torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    def together() -> None:
        work = call(True)
        products(count)
        work.wait()

    for _ in range(2):
        call(False)
        products(1)
    times = _times(size, device)
    collective = _timed(lambda: call(False), times, device)
    one = _timed(lambda: products(1), times, device)
    count = max(1, round(collective / one))  # the same on all ranks: both are
    computing = _timed(lambda: products(count), times, device)
    both = _timed(together, times, device)
    return {"kind": kind, "size": size, "computing": computing, "collective": collective, "together": both}
