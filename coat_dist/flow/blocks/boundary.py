"""The input of a layer that is recomputed in backward, kept as codes by groups.

Any checkpoint works that runs a function of tensors, keeps the tensors, and runs the function again
in backward: torch's two kinds, Megatron's and DeepSpeed's. It is given the codes in place of the
input, and a tensor of the input's shape, with one element of memory, through which the input's
gradient passes. The first run takes the input itself, so its output is unchanged to the bit; later
runs decode.

**In host memory** the checkpoint keeps pinned copies of the codes, and frees them as it would free
codes on the GPU; torch's allocator of pinned memory reuses them in the next step. A stream besides
the current one copies in both directions, in order. Each :class:`_Transfer` knows the one before
it, and backward, which goes from the last layer to the first, starts the load of that one. The
codes of the last layer stay on the GPU until another layer follows: backward needs them at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ...config import ActivationConfig
from ...formats import QuantizedTensor
from ...ops import dequantize, quantize_groups
from ..core.products import saved_format


def checkpoint_codes(
    checkpoint: Callable[..., Any],
    settings: ActivationConfig,
    function: Callable[..., Any],
    x: torch.Tensor,
    *args: Any,
) -> Any:
    """``checkpoint(function, x, *args)``, which keeps codes of x in place of x where x requires
    grad.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return checkpoint(function, x, *args)
    group_size = settings.group_size
    q = quantize_groups(x.detach(), saved_format(settings), group_size, settings.scale)
    kept, unused, transfer = [q.codes, q.scales], [x.detach()], None
    if settings.boundaries_device == "cpu":
        transfer = _Transfer(*kept)
        kept = transfer.store()

    def run(shape: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *args: Any) -> Any:
        def values() -> torch.Tensor:
            if unused:
                return unused.pop()
            q = QuantizedTensor(codes, scales, "group", group_size)
            if transfer is not None:
                q.codes, q.scales = transfer.take()
            return dequantize(q, shape.dtype)

        return function(_InPlaceOf.apply(shape, values), *args)

    shape = _InPlaceOf.apply(x, lambda: x.new_empty(1).expand(x.shape))
    return checkpoint(run, shape, *kept, *args)


class _InPlaceOf(torch.autograd.Function):
    """What ``values`` returns, of x's shape and type; its gradient is that of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        return values()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dx, None


class _Transfer:
    """The way of one layer's codes and scales to host memory and back."""

    latest: Callable[[], _Transfer | None] = staticmethod(lambda: None)
    """A weak reference to the last one."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.on_gpu: Any = tensors
        self.on_host: list[TensorWeakRef] = []
        """References that do not keep the copies: the checkpoint frees those."""
        self.stream = _stream(tensors[0].device)
        self.before, _Transfer.latest = _Transfer.latest, weakref.ref(self)

    def store(self) -> list[torch.Tensor]:
        """Copies in host memory, under way."""
        before = self.before()
        if before is not None:
            before.on_gpu = None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            copies = [_copy(t, "cpu") for t in self.on_gpu]
        for t in self.on_gpu:
            t.record_stream(self.stream)
        self.on_host = [TensorWeakRef(copy) for copy in copies]
        return copies

    def load(self) -> None:
        """Start to copy to the GPU what the checkpoint still keeps, unless it is there."""
        copies = [ref() for ref in self.on_host]
        if self.on_gpu is None and all(copy is not None for copy in copies):
            with torch.cuda.stream(self.stream):
                self.on_gpu = [_copy(t, self.stream.device) for t in copies]

    def take(self) -> list[torch.Tensor]:
        """Codes and scales on the GPU; those of the layer before are on their way."""
        self.load()
        found, self.on_gpu = self.on_gpu, None
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        for t in found:
            t.record_stream(current)
        before = self.before()
        if before is not None:
            before.load()
        return found


def _copy(t: torch.Tensor, device: Any) -> torch.Tensor:
    """A copy of t there, under way on the current stream."""
    copy = torch.empty_like(t, device=device, pin_memory=device == "cpu")
    return copy.copy_(t, non_blocking=True)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
