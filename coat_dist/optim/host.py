"""States in host memory: each step moves them past the kernel in chunks, and back.

With ``state_device="cpu"`` the codes and remainders of a parameter on a GPU lie in pinned host
memory, in one block. A chunk is copied into one of three buffers on one stream, updated by the
step's kernel on the current stream, and copied back on another, so both directions of the bus and
the kernel work at once:

* a load waits until its buffer has been stored (``freed``), and until an earlier step has stored
  the parameter;
* the kernel waits for the load (``loaded``), a store for the kernel (``updated``);
* the last stores run into the next forward. Only :func:`wait` waits for them: code that reads
  states on the host calls it first, as ``CoatAdamW.state`` does. A state dict shares memory with
  states, so once one was made each step waits for its stores.

Chunks begin at multiples of 16 groups, where all addresses are aligned, and know the number of
their first group (``base_row``), so every bit is that of a state on the GPU.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ops import AdamWStep, AdamWTensors, Moment, MomentCodec, adamw_steps
from .sharded import local

CHUNK = 1 << 25
"""Elements that travel at a time: 136 MB with remainders. On an H100 half of it needs 18 % of
the step on the host.
"""
BUFFERS = 3
DEVICES = ("cuda",)
"""Types of devices whose parameters can have states elsewhere; tests add the CPU."""
_ALIGNMENT = 512
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of this process."""


def on_host(param: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """Whether codes and remainders of a parameter are kept in host memory."""
    wanted = (
        group.get("state_device") == "cpu"
        and group["moments"] == "fp8"
        and not group.get("capturable")
    )
    return wanted and param.device.type in DEVICES and local(param).numel() > 0


class _Block(mmap.mmap):
    """Memory that ranks and workers do not copy on fork, pinned until it is freed."""

    pinned = 0
    alive = 0

    def __init__(self, *_: Any) -> None:
        _Block.alive += 1

    def pin(self, address: int) -> None:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        if code:
            raise RuntimeError(
                f"CoatAdamW state_device: got 'cpu', and {len(self) / 2**30:.2f} GiB of host "
                "memory for a parameter's "
                f"state cannot be pinned (CUDA error {code}), accepted: 'parameter', or more free "
                "host memory and a "
                "higher `ulimit -l`"
            )
        self.pinned = address

    def __del__(self) -> None:
        _Block.alive -= 1
        try:
            wait()
            if self.pinned:
                torch.cuda.cudart().cudaHostUnregister(self.pinned)
            if not _Block.alive:  # of the last optimizer
                release()
        except Exception:  # the interpreter or the driver is shutting down
            pass


def to_host(tensors: Mapping[str, torch.Tensor], pin: bool) -> dict[str, torch.Tensor]:
    """Copies in one block of host memory; of tensors on "meta" zeros. Each has a storage of its
    own.
    """
    sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors.values()]
    block = _Block(-1, sum(sizes))
    if pin:
        block.pin(torch.frombuffer(block, dtype=torch.uint8).data_ptr())
    result = {}
    for (key, t), start in zip(
        tensors.items(), itertools.accumulate(sizes, initial=0), strict=False
    ):
        result[key] = torch.frombuffer(block, dtype=t.dtype, count=t.numel(), offset=start).view(
            t.shape
        )
        if not t.is_meta:
            result[key].copy_(t)
    return result


def to_home(state: dict[str, Any], param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Move tensors of a state that lie elsewhere, as after somebody's ``.to(...)``, to where the
    group keeps them.
    """
    tensors = {key: t for key, t in state.items() if isinstance(t, torch.Tensor) and not t.is_meta}
    if on_host(param, group):
        if not all(
            t.device.type == "cpu" and (t.is_pinned() or not param.is_cuda)
            for t in tensors.values()
        ):
            wait()
            state.update(to_host(tensors, param.is_cuda))
    else:
        wait()  # the group's place may have changed since the last step
        state.update(
            {key: t.to(param.device) for key, t in tensors.items() if t.device != param.device}
        )


class _Buffer:
    """One of the buffers of a device, and the events that guard it."""

    def __init__(self, memory: torch.Tensor, event: Any) -> None:
        self.memory = memory
        self.freed, self.loaded, self.updated = event(), event(), event()

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these sizes in the buffer's memory."""
        found, start = [], 0
        for t in tensors:
            found.append(self.memory[start : start + t.nbytes].view(t.dtype).view(t.shape))
            start += -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found


class _Lanes:
    """The streams and buffers of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.api = device, torch.get_device_module(device)
        self.load, self.store = self.api.Stream(device), self.api.Stream(device)
        self.buffers: list[_Buffer] = []
        self.turn = 0
        self.stored: dict[int, Any] = {}  # by the address of a state: the end of its last stores
        self.last: Any = None

    def _provide(self, nbytes: int) -> None:
        """Have buffers of this size. Their memory may come from work of the current stream that
        is not done yet.
        """
        if self.buffers and len(self.buffers[0].memory) >= nbytes:
            return
        memories = [
            torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)
        ]
        self.load.wait_stream(self.api.current_stream(self.device))
        for memory in memories if self.device.type == "cuda" else ():
            memory.record_stream(self.load)
            memory.record_stream(self.store)
        self.buffers = [_Buffer(memory, self.api.Event) for memory in memories]

    def step(
        self, one: AdamWTensors, codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
    ) -> None:
        size, groups = codec_m.group_size, len(one.first_moment.a)
        rows, n = CHUNK // size, one.param.numel()
        param, grad = one.param.view(-1), one.grad.view(-1)
        copy = None if one.copy is None else one.copy.view(-1)
        host = (*one.first_moment, *one.second_moment)
        row_bytes = sum(t[0].nbytes for t in host) + (0 if one.low is None else 2 * size)
        self._provide(rows * row_bytes + _ALIGNMENT * (len(host) + 1))
        compute = self.api.current_stream(self.device)
        done = self.stored.setdefault(host[0].data_ptr(), self.api.Event())
        self.load.wait_event(done)
        for first in range(0, groups, rows):
            inside = slice(first * size, min((first + rows) * size, n))
            far = [t[first : first + rows] for t in host] + (
                [] if one.low is None else [one.low[inside]]
            )
            buffer = self.buffers[self.turn]
            self.turn = (self.turn + 1) % BUFFERS
            near = buffer.like(far)
            with self.api.stream(self.load):
                self.load.wait_event(buffer.freed)
                _copy(near, far)
                buffer.loaded.record(self.load)
            compute.wait_event(buffer.loaded)
            part = AdamWTensors(
                *(param[inside], grad[inside], Moment(*near[:3]), Moment(*near[3:6]), one.seed),
                low=None if one.low is None else near[-1],
                copy=None if copy is None else copy[inside],
                base_row=first,
            )
            adamw_steps([part], codec_m, codec_v, numbers)
            buffer.updated.record(compute)
            with self.api.stream(self.store):
                self.store.wait_event(buffer.updated)
                _copy(far, near)
                buffer.freed.record(self.store)
            done.record(self.store)  # after each chunk: the next one may raise
            self.last = done


def _copy(to: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for target, source in zip(to, given, strict=True):
        target.copy_(source, non_blocking=True)


_lanes: dict[torch.device, _Lanes] = {}


def stream_steps(
    tensors: Sequence[AdamWTensors], codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
) -> None:
    """:func:`coat_dist.ops.adamw_steps` for moments and remainders in host memory."""
    for one in tensors:
        device = one.grad.device
        if device not in _lanes:
            _lanes[device] = _Lanes(device)
        _lanes[device].step(one, codec_m, codec_v, numbers)


def wait() -> None:
    """Wait until states in host memory are what the steps so far have made them."""
    for lanes in list(_lanes.values()):
        if lanes.last is not None:
            lanes.last.synchronize()
            lanes.last = None


def release() -> None:
    """Free the buffers on all devices; the next step makes new ones."""
    wait()
    _lanes.clear()
