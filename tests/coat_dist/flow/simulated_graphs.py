"""CUDA graphs on a CPU, with a pool whose memory is used again as CUDA's allocator does: what a
replay may overwrite.

Inside a capture every operation is written down, and its results lie in an arena. Blocks return to
it when their last tensor dies, and later captures get them. A replay repeats the operations on the
same addresses, whoever owns them by then. Before each one all of the arena but what waiting passes
have saved becomes NaN, so that a graph that reads what it has not made, or what another one has
overwritten, gives other numbers.
"""

from __future__ import annotations

import bisect
import ctypes
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from coat_dist.flow.graphs import cuda_graphs, graph_pool

ALIGNMENT = 64


def at(address: int, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, with its storage at an address, which it does not own."""
    size = tensor.untyped_storage().nbytes()
    raw = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    return raw.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )


class Arena:
    """Memory that is given out at the lowest address where it fits, and comes back."""

    def __init__(self, size: int = 2**20) -> None:
        self._memory = np.zeros(size + ALIGNMENT, np.uint8)
        self.base = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.bytes = np.frombuffer((ctypes.c_ubyte * size).from_address(self.base), np.uint8)
        self.free = [(0, size)]
        self.live: dict[int, int] = {}
        self.used_again = self._end = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in the arena, of which it owns a block."""
        size = -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        i = next(i for i, (_, room) in enumerate(self.free) if room >= size)
        start, room = self.free[i]
        self.free[i : i + 1] = [(start + size, room - size)] if room > size else []
        self.used_again += start < self._end
        self._end = max(self._end, start + size)
        self.live[start] = size
        block = np.frombuffer((ctypes.c_ubyte * size).from_address(self.base + start), np.uint8)
        weakref.finalize(block, self._give_back, start).atexit = False  # type: ignore[misc]
        storage = torch.from_numpy(block).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        return made.copy_(tensor)

    def _give_back(self, start: int) -> None:
        bisect.insort(self.free, (start, self.live.pop(start)))
        joined: list[tuple[int, int]] = []
        for at_, room in self.free:
            if joined and sum(joined[-1]) == at_:
                joined[-1] = joined[-1][0], joined[-1][1] + room
            else:
                joined.append((at_, room))
        self.free = joined

    def spoil(self, kept: list[tuple[int, int]]) -> None:
        """Write NaN to all that is not kept, nor owned by a tensor."""
        mask = np.ones(len(self.bytes), bool)
        for start, size in [*self.live.items(), *kept]:
            mask[start : start + size] = False
        self.bytes[mask] = 0xFF


class Recorder(TorchDispatchMode):
    """Writes down operations; what they make is moved to the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.log: list[tuple[Any, Any, list[torch.Tensor | None]]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = args, kwargs or {}
        places = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves(given)
            if isinstance(t, torch.Tensor)
        }
        addresses = tree_map(_address, given)
        results = operation(*args, **kwargs or {})
        made: list[torch.Tensor | None] = []

        def moved(result: Any) -> Any:
            known = (
                isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in places
            )
            if known or not isinstance(result, torch.Tensor) or not result.numel():
                made.append(None)
                return result
            owned = self.arena.take(result)
            made.append(_address(owned))
            return owned

        results = tree_map(moved, results)
        if not operation.is_view and "empty" not in str(operation):  # those start nothing on a GPU
            self.log.append((operation, addresses, made))
        return results


def _address(value: Any) -> Any:
    return (
        at(value.untyped_storage().data_ptr(), value)
        if isinstance(value, torch.Tensor) and value.numel()
        else value
    )


class Graph:
    """What was written down."""

    def __init__(self, recorder: Recorder) -> None:
        self.log = recorder.log

    def replay(self) -> None:
        with torch.no_grad():
            for operation, (args, kwargs), made in self.log:
                for place, result in zip(
                    made, tree_leaves(operation(*args, **kwargs)), strict=True
                ):
                    if place is not None:
                        place.copy_(result)


class SimulatedPool(graph_pool.Pool):
    """:class:`~coat_dist.flow.graphs.graph_pool.Pool` with an arena in the place of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting = graph_pool.Waiting()
        self.stale, self._generation, self._put_off = False, 0, 0
        self.arena = Arena()
        self.captured = 0

    def record(self, work: Any) -> tuple[Any, Any]:
        before = self.arena.bytes.copy()
        with Recorder(self.arena) as recorder:
            result = work()
        self.arena.bytes[:] = before  # a capture computes nothing
        self.captured += 1
        return Graph(recorder), result


def simulate(monkeypatch: Any) -> None:
    """Let functions on a CPU be captured, for a test."""

    def init(self, pool, *args):
        before = {*pool.arena.live}
        original_init(self, pool, *args)
        self.saved = [block for block in pool.arena.live.items() if block[0] not in before]

    def spoiled(method):
        def run(self, *args):
            self.pool.arena.spoil(
                [block for graph in self.pool.waiting.now() for block in graph.saved]
            )
            return method(self, *args)

        return run

    original_init = cuda_graphs._Graph.__init__
    monkeypatch.setattr(cuda_graphs._Graph, "__init__", init)
    for name in ("forward", "backward"):
        monkeypatch.setattr(cuda_graphs._Graph, name, spoiled(getattr(cuda_graphs._Graph, name)))
    monkeypatch.setattr(
        cuda_graphs, "without_owner", lambda t: at(t.untyped_storage().data_ptr(), t.detach())
    )
    monkeypatch.setattr(graph_pool, "Pool", SimulatedPool)
    monkeypatch.setattr(graph_pool, "_pools", {})
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=0)
    )
