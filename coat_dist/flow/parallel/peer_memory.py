"""Rows that ranks of one machine read from each other's memory, beside products.

A kernel of NCCL occupies multiprocessors; a product that is started beside it lacks them, or keeps
NCCL waiting until it ends. Here the GPUs' copy engines move data: a rank writes what others need
into its own *room*, a barrier says that all rooms are written, and copies on a separate stream
fetch from the others' rooms what this rank needs.

**How the memory is mapped.** ``torch.distributed._symmetric_memory`` allocates a buffer of the same
size on every rank of the group by the driver's virtual memory interface. ``rendezvous`` exchanges
the handles and maps every rank's buffer into the address space of this process; ``get_buffer`` is
then a tensor on *this* device whose bytes are in the memory of another GPU. A plain ``copy_`` from
it is a copy over NVLink or PCIe. The views are made once, as they cost more host time than a copy.
NVLink multicast is not used. The buffer is outside of torch's allocator: two rooms of the largest
exchange for each group. A larger exchange than any before allocates and maps a new buffer, which
is a collective (:meth:`PeerMemory.holds`).

**An exchange** is, on every rank in the same order: :meth:`PeerMemory.room` (or ``reserve``, for
tensors that a kernel writes there directly), writes on the current stream,
:meth:`PeerMemory.written`, and :meth:`PeerMemory.fetch`, whose copies are waited for one by one.

**What orders reads and writes.**

* *A write before its reads.* ``written`` puts a barrier of all ranks on the stream that computes.
  The stream of copies waits for this barrier, so no copy reads a room before its owner has written
  it.
* *Reads before the next write.* There are two rooms, taken in turn. Before barrier ``k`` the stream
  that computes waits for this rank's copies of exchange ``k - 1``. So behind barrier ``k`` the
  copies up to ``k - 1`` are done on all ranks, and the room that they read may be written: by
  exchange ``k + 1``, which takes the same room. These waits cost nothing, as copies are done long
  before the next exchange.
* *Streams.* Where another stream computes than in the exchange before, it waits for that one first.
* *Exceptions.* An exchange that ended before its barrier gives its room to the next one: no rank
  has passed the barrier, so none has read it.

**What is refused.** :func:`peer_memory` returns None, and ranks use NCCL, where

* one rank sends fewer than :data:`FEWEST` elements to another: the host would be the bottleneck;
* the backend is not NCCL, ranks are on several machines or share a GPU, a GPU cannot access a
  peer's memory, or the GPU is AMD's. All ranks find the same, by a collective;
* a CUDA graph is being captured: it may not wait for copies that it does not hold;
* the driver has no memory for a buffer on some rank, at once (containers may forbid the mapping) or
  for a larger one later. A warning says so, and all ranks of the group go on over NCCL;
* ``COAT_PEER_MEMORY=0``. The value must be the same on all ranks, or they would hang.

A layer has a dozen exchanges, whose cost is the host's: streams are asked for by the device's
number and switched by :class:`On`, since torch finds out the current device each time otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...config import CoatConfigError
from ...ranks import gather
from ..function import outside_of_graphs

FEWEST = 3 * 2**23
"""Elements of what one rank sends from which this is worth it. The host has more to do here than
for a collective, and does not keep up with short products: on H200s 2**24 elements were slower,
2**25 faster (docs/flow.md, peer memory).
"""
SWITCH = "COAT_PEER_MEMORY"
ALIGNMENT = 512


class Fetched:
    """Copies under way to GPU ``device``; ``wait()`` makes the current stream wait for them."""

    def __init__(self, done: torch.cuda.Event, device: int | None) -> None:
        self.done, self.device = done, device

    @outside_of_graphs
    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.done)


class On:
    """As ``torch.cuda.stream``, for a stream of the current device; to be entered again and
    again.
    """

    def __init__(self, stream: torch.cuda.Stream, device: int | None) -> None:
        self.stream, self.device = stream, device

    def __enter__(self) -> None:
        self.before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self.before)


class PeerMemory:
    """The rooms of one process group, whose ranks all call the same methods with the same sizes
    in the same order.
    """

    _reserved: list[torch.Tensor] | None = None
    _stream: torch.cuda.Stream | None = None
    _begun = False
    """Whether a room was taken whose barrier has not come yet."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._bytes = self._turn = 0
        self._buffer: torch.Tensor | None = None
        self._handle: Any = None
        self._theirs: list[torch.Tensor] = []
        """Every rank's rooms, as bytes."""
        self._copies, self._products = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._on_copies = On(self._copies, device.index)
        self._on_products = On(self._products, device.index)
        self._last: Fetched | None = None
        self._before: Fetched | None = None

    def room(self, *nbytes: int) -> list[torch.Tensor]:
        """A new exchange: parts of this rank's room, uint8, to be written on the current stream.

        Raises:
            RuntimeError: there is no memory for a room of this size, on all ranks.
        """
        offsets = self._offsets(nbytes)
        if not self.holds(offsets[-1]):
            raise RuntimeError(f"no memory for two rooms of {offsets[-1]} bytes on all ranks")
        stream = torch.cuda.current_stream(self.device.index)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        if not self._begun:
            self._turn ^= 1
            self._before = self._last
        self._begun = True
        assert self._buffer is not None
        first = self._turn * self._bytes
        return [
            self._buffer[first + at : first + at + n]
            for at, n in zip(offsets[:-1], nbytes, strict=True)
        ]

    @outside_of_graphs
    def reserve(self, *kinds: tuple[Sequence[int], torch.dtype]) -> list[torch.Tensor]:
        """A new exchange: tensors in this rank's room, to be written on the current stream and
        given to :meth:`gather`, which has nothing to copy then. They last until the exchange after
        the next.
        """
        parts = self.room(*(math.prod(shape) * dtype.itemsize for shape, dtype in kinds))
        self._reserved = [
            p.view(dtype).view(*shape) for p, (shape, dtype) in zip(parts, kinds, strict=True)
        ]
        return self._reserved

    def written(self) -> None:
        """A barrier: what ranks wrote into their rooms until now can be fetched."""
        stream = torch.cuda.current_stream(self.device.index)
        if self._before is not None:
            stream.wait_event(self._before.done)
            self._before = None
        self._begun = False
        self._handle.barrier(channel=0)
        self._copies.wait_stream(stream)

    def fetch(
        self, sizes: tuple[int, ...], wanted: dict[int, dict[int, torch.Tensor]]
    ) -> dict[int, Fetched]:
        """Start copying parts of ranks' rooms into contiguous tensors, one rank's after the
        other's.

        Args:
            sizes: as :meth:`room` was given them.
            wanted: rank -> part -> where it goes.

        Returns:
            rank -> what has to be waited for.
        """
        offsets, first, coming = self._offsets(sizes), self._turn * self._bytes, {}
        with self._on_copies:
            for rank, parts in wanted.items():
                for part, out in parts.items():
                    theirs = self._theirs[rank].narrow(0, first + offsets[part], sizes[part])
                    out.view(-1).view(torch.uint8).copy_(theirs, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._copies)
                self._last = coming[rank] = Fetched(done, self.device.index)
        return coming

    @outside_of_graphs
    def gather(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, Fetched]]:
        """All ranks' tensors one after the other along dimension 0, and by rank when they will
        have come.
        """
        sizes = tuple(t.nbytes for t in tensors)
        if self._reserved is None or self._reserved[0] is not tensors[0]:
            for part, t in zip(self.room(*sizes), tensors, strict=True):
                part.copy_(t.view(-1).view(torch.uint8))
        self._reserved = None
        # Before the barrier: with deterministic algorithms torch fills new memory, and copies must
        # come after that.
        outs = [t.new_empty(self.size * t.shape[0], *t.shape[1:]) for t in tensors]
        self.written()
        parts = [out.chunk(self.size) for out in outs]
        # This rank's own last.
        order = [(self.rank + step) % self.size for step in range(1, self.size + 1)]
        return outs, self.fetch(
            sizes, {rank: {i: part[rank] for i, part in enumerate(parts)} for rank in order}
        )

    def fork(self) -> None:
        """What is computed :meth:`beside` the current stream may begin when this has come here."""
        self._products.wait_stream(torch.cuda.current_stream(self.device.index))

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """What is computed inside runs beside the current stream, between :meth:`fork` and
        :meth:`join`.
        """
        return self._on_products

    def join(self) -> None:
        """The current stream waits for what ran :meth:`beside` it."""
        torch.cuda.current_stream(self.device.index).wait_stream(self._products)

    @staticmethod
    def _offsets(sizes: tuple[int, ...]) -> list[int]:
        offsets = [0]
        for n in sizes:
            offsets.append(offsets[-1] + -(-n // ALIGNMENT) * ALIGNMENT)
        return offsets

    def holds(self, nbytes: int) -> bool:
        """Whether a room has this many bytes, made larger if not, which is a collective. The
        same on all ranks.
        """
        if nbytes <= self._bytes:
            return True
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize(self.device)
        self._all(True)  # nobody reads the old rooms any more
        self._buffer = self._handle = self._last = self._before = self._reserved = None
        self._theirs = []
        self._bytes, self._begun = 0, False
        with torch.inference_mode(False):  # a room that evaluation makes is written in training
            buffer = self._allocate(2 * nbytes)
        if not self._all(buffer is not None) or buffer is None:
            return False
        self._buffer, self._bytes = buffer, nbytes
        self._handle = symmetric.rendezvous(buffer, self.group.group_name)
        with torch.inference_mode(False):
            self._theirs = [
                self._handle.get_buffer(r, buffer.shape, torch.uint8, 0) for r in range(self.size)
            ]
        return True

    def _allocate(self, nbytes: int) -> torch.Tensor | None:
        import torch.distributed._symmetric_memory as symmetric

        try:
            return symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError:  # the driver has none left; torch may keep some that nobody uses
            torch.cuda.empty_cache()
        try:
            return symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            warnings.warn(
                f"tensor-parallel ranks exchange rows by NCCL alone from now on: rank {self.rank} "
                f"of the group has no {nbytes} bytes for others to read: {error}",
                stacklevel=2,
            )
            return None

    def _all(self, mine: bool) -> bool:
        """Whether it is so on all ranks. The host waits."""
        everyone = torch.tensor(float(mine), device=self.device)
        dist.all_reduce(everyone, dist.ReduceOp.MIN, group=self.group)
        return bool(everyone.item())


_of_group: dict[dist.ProcessGroup, PeerMemory | None] = {}
_switched: set[dist.ProcessGroup] = set()
"""Groups whose ranks have the same ``COAT_PEER_MEMORY``."""


@outside_of_graphs
def peer_memory(
    group: dist.ProcessGroup | None, elements: int, itemsize: int, device: torch.device
) -> PeerMemory | None:
    """The rooms of this group where its GPUs can read each other's memory and it is worth it; else
    None.

    Args:
        elements: of what one rank sends to another.
        itemsize: bytes of one.

    The first call with enough elements is a collective, and so is one with more bytes than any
    before. Ranks have to find the same: also where torch.compile traces a call on one of them and
    not on another.

    Raises:
        CoatConfigError: ``COAT_PEER_MEMORY`` is neither 0 nor 1, or not the same on all ranks.
    """
    if group is None or device.type != "cuda" or elements < FEWEST:
        return None
    # A graph may not wait for copies that it does not hold.
    if torch.cuda.is_current_stream_capturing():
        return None
    if group not in _switched:
        check_switch(group)
        _switched.add(group)
    if os.environ.get(SWITCH) == "0":  # nothing is tried then
        return None
    if group not in _of_group:
        _of_group[group] = _try(group, device) if _all_can_read(group, device) else None
    if (peers := _of_group[group]) is None:
        return None
    # More than any exchange of parts of this size takes.
    if not peers.holds(peers.size * elements * itemsize):
        _of_group[group] = None
    return _of_group[group]


def check_switch(group: dist.ProcessGroup) -> None:
    """A collective. Raises CoatConfigError on all ranks where one has another
    ``COAT_PEER_MEMORY`` than it should.
    """
    everyone = gather(os.environ.get(SWITCH, "1"), group)
    for rank, value in enumerate(everyone):
        if value not in ("0", "1") or value != everyone[0]:
            raise CoatConfigError(
                f"{SWITCH}: got {value!r} on tensor-parallel rank {rank} and {everyone[0]!r} on "
                "rank 0, accepted: 0 or 1 (the default), the same on all ranks"
            )


def _all_can_read(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks are on one machine, each with a GPU of its own that reads those of the
    others.
    """
    try:
        import torch.distributed._symmetric_memory  # noqa: F401

        usable = dist.get_backend(group) == "nccl" and torch.version.hip is None
    except ImportError:
        usable = False
    everyone = gather((usable, socket.gethostname(), _boot(), device.index), group)
    others = [index for *_, index in everyone if index != device.index]
    able = (
        all((*one[:-1],) == (True, *everyone[0][1:-1]) for one in everyone)
        and len(others) == len(everyone) - 1
        and all(other < torch.cuda.device_count() for other in others)
        and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    )
    return all(gather(able, group))


def _try(group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    """The rooms, if every rank can make small ones: a container may forbid what they take."""
    peers = PeerMemory(group, device)
    try:
        able = peers.holds(ALIGNMENT)
    except RuntimeError as error:
        warnings.warn(f"tensor-parallel ranks exchange rows by NCCL alone: {error}", stacklevel=2)
        able = False
    return peers if all(gather(able, group)) else None


def _boot() -> str:
    """What tells machines of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
