"""The order in which ranks write, read and write again what they read from each other.

The real class runs on gloo ranks. Memory that they share stands in for that of GPUs, and copies
come as late as streams and events let them: a room that is written again too early, or freed, is
read wrong. Whole layers: ``test_overlap.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from coat_dist.config import ActivationConfig
from coat_dist.flow import Norm, TensorParallel, norm_mlp
from coat_dist.flow.parallel import peer_memory
from coat_dist.flow.parallel.peer_memory import PeerMemory
from tests.support import equal, run_ranks

H, F, B = 64, 96, 3
CPU = torch.device("cpu")


class Stream:
    """Copies are put off until somebody waits for them; all else is done at once, by the host."""

    current: Stream
    every: list[Stream] = []
    done = 0

    def __init__(self, *_):
        self.later, self.awaited = [], []
        self.every.append(self)

    def wait_stream(self, other):
        self.awaited.append(other)
        other.run(len(other.later))

    def wait_event(self, event):
        event.stream.run(event.place - event.stream.done)

    @classmethod
    def synchronize(cls, *_):
        for stream in cls.every:
            stream.run(len(stream.later))

    def run(self, count):
        for _ in range(count):
            self.done += 1
            into, source = self.later.pop(0)
            into.copy_(source)


class Event:
    def record(self, stream):
        self.stream, self.place = stream, stream.done + len(stream.later)


class Late(TorchDispatchMode):
    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.stream.later.append(args[:2])
            return args[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def on(stream):
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


class Handle:
    def __init__(self, group, rooms):
        self.group, self.rooms = group, rooms

    def barrier(self, channel):
        dist.barrier(self.group)

    def get_buffer(self, rank, shape, dtype, offset):
        return self.rooms[rank][offset : offset + shape.numel()]


class Machine:
    """Stand-ins for what a GPU and torch's symmetric memory do."""

    def __init__(self, folder, memory=2**40):
        self.folder, self.memory, self.files = Path(folder), memory, {}
        self.numbers = itertools.count()

    def empty(self, nbytes, dtype, device):
        if nbytes > self.memory:
            raise RuntimeError("CUDA driver error: out of memory")
        file = str(self.folder / f"{dist.get_rank()}.{next(self.numbers)}")
        room = torch.from_file(file, shared=True, size=nbytes, dtype=dtype).fill_(255)
        self.files[room.data_ptr()] = file, nbytes
        return room

    def rendezvous(self, room, group_name):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.files[room.data_ptr()])
        return Handle(
            dist.group.WORLD,
            [torch.from_file(f, shared=True, size=n, dtype=torch.uint8) for f, n in everyone],
        )

    @contextlib.contextmanager
    def here(self):
        Stream.current = Stream()
        with contextlib.ExitStack() as stack:
            for name, stand_in in {
                "Stream": Stream,
                "Event": Event,
                "current_stream": lambda *_: Stream.current,
                "synchronize": Stream.synchronize,
                "empty_cache": lambda: None,
            }.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
            stack.enter_context(
                mock.patch.object(peer_memory, "On", lambda stream, _: Late(stream))
            )
            stack.enter_context(mock.patch.object(symmetric, "empty", self.empty))
            stack.enter_context(mock.patch.object(symmetric, "rendezvous", self.rendezvous))
            # Parts that run beside each other here run one after the other.
            stack.enter_context(
                mock.patch.object(PeerMemory, "beside", lambda _: contextlib.nullcontext())
            )
            yield


def through(peers):
    """All that ranks exchange goes through these rooms."""
    return mock.patch.object(
        TensorParallel, "peers", lambda tp, *_: peers if tp.reads_peers else None
    )


class Block:
    """An MLP of several sizes, and its gradients."""

    def __init__(self, tp):
        torch.manual_seed(dist.get_rank())
        self.tp, self.norm = tp, Norm("rmsnorm", 1e-5, torch.ones(H))
        self.weights = [torch.randn(shape, requires_grad=True) for shape in ((F, H), (H, F // 2))]

    def __call__(self, x):
        return norm_mlp(x, self.norm, *self.weights, "swiglu", self.tp, ActivationConfig())

    def result(self, rows, recomputed=False, call=None):
        x = torch.linspace(-1, 1, rows * B * H).sin().view(rows, B, H) + dist.get_rank()
        x.requires_grad_()
        y = checkpoint(self, x, use_reentrant=False) if recomputed else (call or self)(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *self.weights])]


def odd_uses(rank, world, folder):
    """Facts about exchanges that do not follow each other as in plain training."""
    tp = TensorParallel(dist.group.WORLD, True)
    block, facts = Block(tp), {}
    plain = {rows: block.result(rows) for rows in (4, 8, 2)}
    with Machine(folder).here():
        peers = PeerMemory(dist.group.WORLD, CPU)
        with through(peers):
            with torch.inference_mode():
                block(torch.ones(2, B, H))
            gathered = tp.gather_rows(torch.ones(2, 4))
            facts["evaluation first"] = torch.equal(gathered, torch.ones(4, 4)) and equal(
                block.result(2), plain[2]
            )
            facts["sizes"] = all(equal(block.result(rows), plain[rows]) for rows in (4, 8, 2, 8, 4))
            facts["recomputed"] = equal(block.result(4, recomputed=True), plain[4])
            coming = tp.start_gather(torch.full((2, 4), 3.0))
            peers.room(512)  # and then an exception
            others = tp.start_gather(torch.full((2, 4), 5.0))
            facts["abandoned"] = torch.equal(coming.wait()[0] + 2, others.wait()[0]) and equal(
                block.result(4), plain[4]
            )
            first, second = Stream.current, Stream()
            with on(second):
                facts["another stream"] = (
                    equal(block.result(4), plain[4]) and first in second.awaited
                )
            facts["and back"] = equal(block.result(4), plain[4]) and second in first.awaited
        order = []
        real = PeerMemory.written, torch.Tensor.new_empty
        with (
            mock.patch.object(
                PeerMemory, "written", lambda self: (order.append("barrier"), real[0](self))[1]
            ),
            mock.patch.object(
                torch.Tensor,
                "new_empty",
                lambda *a, **k: (order.append("new"), real[1](*a, **k))[1],
            ),
        ):
            peers.gather([torch.ones(4, 4)])
        facts["memory before the barrier"] = order == ["new", "barrier"]
    return [name for name, good in facts.items() if not good]


def test_peer_memory_with_exchanges_in_odd_orders(tmp_path) -> None:
    assert run_ranks(2, odd_uses, str(tmp_path)) == [[], []]


def without_memory(rank, world, folder):
    """What ranks do where one of them has no memory for a larger room."""
    group = dist.group.WORLD
    warned = []
    with Machine(folder, memory=2**28 if rank else 2**40).here():
        peers = PeerMemory(group, CPU)
        gpu = mock.Mock(type="cuda")
        with (
            mock.patch.dict(peer_memory._of_group, {group: peers}, clear=True),
            mock.patch.object(peer_memory, "_switched", {group}),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            few = peer_memory.FEWEST
            given = (few - 1, 1), (few, 1), (few, 4), (few, 1)
            uses = [
                peer_memory.peer_memory(group, n, itemsize, gpu) is peers for n, itemsize in given
            ]
            warned = [str(w.message) for w in caught if "NCCL" in str(w.message)]
    return uses, len(warned), all("rank 1 of the group" in text for text in warned)


def test_peer_memory_where_a_rank_has_no_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = [False, True, False, False]
        assert run_ranks(2, without_memory, folder) == [(expected, 0, True), (expected, 1, True)]


def compiled(rank, world, folder):
    """Whether a compiled block has the results of one that is not, for several sizes, without
    rooms and with them.
    """
    block, found = Block(TensorParallel(dist.group.WORLD, True)), []
    plain = {rows: block.result(rows) for rows in (4, 8)}
    with Machine(folder).here():
        for peers in (None, PeerMemory(dist.group.WORLD, CPU)):
            torch.compiler.reset()
            call = torch.compile(block.__call__, backend="eager")
            with through(peers):
                found += [equal(block.result(rows, call=call), plain[rows]) for rows in (4, 8, 4)]
    return found


@pytest.mark.slow
def test_peer_memory_compiled_for_several_lengths(tmp_path) -> None:
    assert run_ranks(2, compiled, str(tmp_path)) == [[True] * 6] * 2
