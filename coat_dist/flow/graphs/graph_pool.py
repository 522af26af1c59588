"""The memory of CUDA graphs (:mod:`~coat_dist.flow.graphs.cuda_graphs`), and the order in which
they may use it.

All graphs of a stream share one of torch's private pools. While a graph is captured, tensors are
freed and their places used again as in eager execution: what forward saves is free once backward
has read it, and one layer's gradients lie where the last one's were. Between replays nothing of
that is anybody's, as far as torch knows, so it is right only in the order in which the graphs were
captured. What decides is which forward passes *wait* for their backward, as they hold memory: the
pool keeps a list of them.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LONG = 1000
"""Calls of functions."""


class Pass:
    """One forward pass by a graph, its owner; whoever can run its backward holds it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.waits = True


class Waiting:
    """Forward passes whose backward is to come, in their order. One that nobody can run backward
    any more (its part of the autograd graph is gone) does not count.
    """

    def __init__(self) -> None:
        self._passes: list[weakref.ref[Pass]] = []

    def now(self) -> tuple[Any, ...]:
        """The owners of those that wait, first to last."""
        alive = [(ref, one) for ref in self._passes if (one := ref()) is not None and one.waits]
        self._passes = [ref for ref, _ in alive]
        return tuple(one.owner for _, one in alive)

    def add(self, one: Pass) -> None:
        """``one`` has begun."""
        self._passes.append(weakref.ref(one))

    def finish(self, one: Pass) -> None:
        """``one`` runs backward now. Those that began after it lose what they have saved.

        Raises:
            RuntimeError: its backward has run already, or that of an earlier one has.
        """
        if not one.waits:
            raise RuntimeError(
                "activation.cuda_graphs: a layer's backward ran twice, or after that of a layer "
                "before it, and what it "
                "had saved is overwritten; accepted: one backward for each forward pass (no "
                "retain_graph), the last "
                "one first where there are several; or false"
            )
        while self._passes:
            last = self._passes.pop()()
            if last is not None:
                last.waits = False
            if last is one:
                return


class Pool:
    """Memory that the graphs of a stream share, and the forward passes that hold some of it.

    Attributes:
        waiting: those passes.
        stale: graphs are to be made anew, in the order of the calls, once nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting = Waiting()
        self.stale = False
        self._generation = 0
        self._put_off = 0  # calls since graphs were to be made anew
        self._handle: Any = None
        # torch's own for captures is on the device of the first one.
        self._stream = torch.cuda.Stream(device)
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._recorded = 0
        self._size = (0, 0), 0

    def bytes(self) -> int:
        """What the pool takes of the GPU; kept, as a look at the allocator's state takes long."""
        state = len(self._graphs), self._recorded
        if self._size[0] != state:
            segments = torch.cuda.memory_snapshot()
            self._size = (
                state,
                sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._handle),
            )
        return self._size[1]

    def can_capture(self) -> bool:
        """Whether what waiting passes have saved is out of a new graph's reach: once their backward
        has been captured, it lies where captured memory is free.
        """
        return not any(graph.is_whole for graph in self.waiting.now())

    def generation(self) -> int:
        """Functions drop graphs of an earlier one."""
        if self.stale and not self.waiting.now():
            self.stale, self._put_off = False, 0
            self._generation += 1
        elif self.stale:
            self._put_off += 1
            if self._put_off == _LONG:
                run_without_graphs(
                    "they are to be made anew, and some forward pass waits for its backward all "
                    "the time"
                )
        return self._generation

    def record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of what ``work`` starts, and what it returns; nothing is computed yet.

        Raises:
            RuntimeError: it cannot be captured. Torch's random numbers may be of no use after that.
            torch.OutOfMemoryError
        """
        # Torch forgets a pool with its last graph: none may go between this line and the next.
        users = [*self._graphs]
        with torch.cuda.device(self.device):
            if not users:
                self._handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads (NCCL's watchdog, loaders that pin memory) go on calling CUDA.
            options = {
                "pool": self._handle,
                "stream": self._stream,
                "capture_error_mode": "thread_local",
            }
            try:
                with torch.cuda.graph(graph, **options):
                    result = work()
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                raise RuntimeError(
                    "activation.cuda_graphs: got true, accepted: false, as a layer could not be "
                    f"captured: {problem}"
                ) from problem
        del users
        self._graphs.add(graph)
        self._recorded += 1
        return graph, result


_pools: dict[tuple[torch.device, int], Pool] = {}


def pool_of(device: torch.device) -> Pool:
    """That of the device's current stream: graphs that wait for each other on no stream may not
    share memory.
    """
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _pools:
        _pools[key] = Pool(device)
    return _pools[key]


def pool_bytes(device: torch.device) -> int:
    """GPU memory that is kept for graphs; what they use of it does not count as allocated, once
    they are captured.
    """
    return sum(pool.bytes() for (where, _), pool in _pools.items() if where == device)


def run_without_graphs(why: str) -> None:
    """Warn, once for each reason, that layers run as they are."""
    warnings.warn(f"activation.cuda_graphs: layers run without CUDA graphs: {why}", stacklevel=2)


@contextlib.contextmanager
def without_filling() -> Iterator[None]:
    """``torch.empty`` leaves memory as it is, also with ``use_deterministic_algorithms``, which has
    NaN written there: a graph would write them over what was copied to that place before its
    replay.
    """
    switch: Any = torch.utils.deterministic
    before, switch.fill_uninitialized_memory = switch.fill_uninitialized_memory, False
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = before


class _Bytes:
    """Memory by its address, for torch to look at without keeping it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def without_owner(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous memory, which stays free for others: a graph's pool keeps it from the
    rest of the program.
    """
    if tensor.numel() == 0:
        return tensor.detach()
    return (
        torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    )
