"""How every benchmark takes time: on the GPU between events, on the GPU without the host, and by
the host's clock.

All times are milliseconds, and where a call is repeated they are medians. What is measured decides
which to take:

* :func:`timed`: a call that keeps the GPU busy for longer than it takes to start its kernels;
* :func:`graph_ms`: the kernels alone, where starting them would take longer than they do;
* :func:`stages_ms`: several calls that follow each other, each on its own (forward, backward);
* :func:`wall_ms`: one call by the host's clock, with or without the GPU work that it started.

Spans of time that a profiler found are put together by :func:`union`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

Time = TypeVar("Time", int, float)


def union(spans: Iterable[tuple[Time, Time]]) -> list[tuple[Time, Time]]:
    """The same time, (start, end) each, as spans that do not overlap, in order."""
    found: list[tuple[Time, Time]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number of values the larger one of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def stages_ms(stages: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    """Median time of each of ``stages``, which are called one after the other ``repeat`` times.

    Times are between CUDA events before, between and after the stages. The host waits for the GPU
    after the last repetition only. There is no warm-up: the caller does that.
    """
    passes = []
    for _ in range(repeat):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(stages) + 1)]
        events[0].record()
        for stage, end in zip(stages, events[1:], strict=True):
            stage()
            end.record()
        passes.append(events)
    torch.cuda.synchronize()
    return [median([e[i].elapsed_time(e[i + 1]) for e in passes]) for i in range(len(stages))]


def timed(call: Callable[[], Any], repeat: int = 30) -> float:
    """Median time of one call, between CUDA events, after three calls to warm up."""
    for _ in range(3):
        call()
    return stages_ms([call], repeat)[0]


def graph_ms(calls: Sequence[Callable[[], Any]], replays: int = 20) -> float:
    """Median time of one of ``calls`` on the GPU, without the time that the host takes to start its
    kernels.

    All calls are recorded, one after the other, into one CUDA graph, which is replayed once to warm
    up and then ``replays`` times. Where each call works on buffers of its own and all of them
    together exceed the cache, no call finds its data there.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    return stages_ms([graph.replay], replays)[0] / len(calls)


def wall_ms(call: Callable[[], Any], *, synchronize: bool) -> float:
    """Time of one call by the host's clock: until it returns, or with ``synchronize`` until the GPU
    is done as well.

    The GPU has to be idle before; the caller sees to that.
    """
    began = time.perf_counter()
    call()
    if synchronize:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def copy_bandwidth() -> float:
    """Bytes per second of a copy of 2 GiB on the GPU, read plus written: what other kernels are
    compared with.
    """
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed(lambda: target.copy_(source)) * 1e-3)
