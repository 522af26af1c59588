"""Core attention: PyTorch's SDPA, and one that keeps queries, keys, values and output in FP8 for backward.

The FP8 one computes from what it keeps. q, k and v are quantized by groups and read back; SDPA sees these values in
forward and again in backward. Its output is quantized and read back too, and that is what is returned: the projection
that follows multiplies the values that backward will see. Gradients pass through the roundings unchanged.

SDPA's backward kernels take the output only for ``delta = rowsum(dO * O)``. They get the rounded one, while softmax is
that of the unrounded: a row of dS then sums to ``dO · (O - Ô)`` instead of zero. docs/flow.md has the size of that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import ActivationConfig
from ..formats import QuantizedTensor
from ..ops import dequantize, quantize_groups
from .function import without_autocast
from .scaling import saved_format

__all__ = ["attention", "sdpa"]

# Causal, 4096 tokens, H200: cuDNN 535 TFLOP/s forward and 466 backward, PyTorch's flash backend 299 and 257.
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """``softmax(q kᵀ · scale) v`` by ``torch.nn.functional.scaled_dot_product_attention``, on Hopper by cuDNN first.

    Args:
        q: ``[s, b, heads, d]``.
        k, v: ``[t, b, groups, d]``, groups a divisor of heads.
        scale: None for ``d ** -0.5``.

    Returns:
        ``[s, b, heads * d]``, an alias of what SDPA keeps for backward.
    """
    out = _sdpa(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), causal=causal, scale=scale, dropout=dropout)
    # Kernels lay their output out like the queries, or as [b, s, heads, d]: merging heads copies neither.
    return out.permute(2, 0, 1, 3).flatten(2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: ActivationConfig,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, QuantizedTensor]:
    """:func:`sdpa` on values rounded to per-group FP8, its output rounded too; only codes are kept for backward.

    Groups lie within a head, so nothing depends on how heads are spread over ranks. There is no dropout.

    Args:
        q: ``[s, b, heads, d]``, bfloat16 or float32.
        k, v: ``[t, b, groups, d]``, groups a divisor of heads.
        settings: ``saved_format``, ``group_size`` and ``scale`` say how to round.

    Returns:
        The output ``[s, b, heads * d]`` of q's dtype, and the same as a per-group quantized tensor: hand it to
        :func:`~coat_dist.flow.linear` as ``compressed``, so that nobody keeps the first.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or t.dtype != q.dtype or t.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{name}: got {t.dtype} {list(t.shape)}, accepted: [s, b, heads, d] of one dtype, torch.bfloat16 or "
                "torch.float32"
            )
    if k.shape != v.shape or k.shape[1::2] != q.shape[1::2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k, v: got shapes {list(k.shape)}, {list(v.shape)} for q of shape {list(q.shape)}, accepted: equal ones, "
            "with q's b and d and a divisor of q's heads"
        )
    if causal and q.shape[0] != k.shape[0]:
        raise ValueError(f"k: got {k.shape[0]} keys for {q.shape[0]} queries, accepted: equal lengths where causal")
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    out, codes, scales = _Attention.apply(q, k, v, settings, causal, scale, keep)
    return out, QuantizedTensor(codes, scales, "group", settings.group_size)


class _Attention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, q, k, v, settings: ActivationConfig, causal: bool, scale: float | None, keep: bool):
        ctx.set_materialize_grads(False)
        kept = [_compress(t, settings) for t in (q, k, v)]
        values = [_values(c, t.shape, t.dtype) for c, t in zip(kept, (q, k, v), strict=True)]
        if keep:
            ctx.node = _Node(values, causal, scale)
            out, extras = ctx.node.take()
        else:
            out, extras = _sdpa(*values, causal=causal, scale=scale), []
        kept.append(_compress(out.permute(2, 0, 1, 3), settings))
        ctx.save_for_backward(*(t for c in kept for t in (c.codes, c.scales)), *extras)
        ctx.args = q.dtype, q.shape, k.shape, settings.group_size
        ctx.mark_non_differentiable(kept[3].codes, kept[3].scales)
        # A view, on purpose: autograd then refuses to change it in place. Its codes, which the projection that follows
        # keeps for backward, would not follow.
        out = dequantize(kept[3], q.dtype).view(*q.shape[:2], q.shape[2] * q.shape[3])
        return out, kept[3].codes, kept[3].scales

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dout: torch.Tensor | None, *_: None):
        if dout is None:
            return (None,) * 7
        dtype, q_shape, k_shape, group_size = ctx.args
        tensors = ctx.saved_tensors
        kept = [QuantizedTensor(tensors[i], tensors[i + 1], "group", group_size) for i in (0, 2, 4, 6)]
        shapes = q_shape, k_shape, k_shape, q_shape
        values = [_values(c, shape, dtype) for c, shape in zip(kept, shapes, strict=True)]
        grads = ctx.node.backward(dout.reshape(q_shape).permute(1, 2, 0, 3), values, tensors[8:])
        return *(g.permute(2, 0, 1, 3) for g in grads), None, None, None, None


class _Node:
    """SDPA's own node of the autograd graph, without the tensors that it saved.

    PyTorch decides which kernel runs, what it keeps and how its backward is called. Of what it saves, queries, keys,
    values and output are dropped here, and given back while backward runs. The rest, ``extras`` (logarithms of sums,
    random state), the caller saves.
    """

    def __init__(self, values: Sequence[torch.Tensor], causal: bool, scale: float | None) -> None:
        """Runs :func:`_sdpa` of q, k, v ``[b, heads, s, d]``."""
        self._saved = _Saved()
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            inputs = [_GradientEdge.apply(v, anchor) for v in values]
            with saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                out = _sdpa(*inputs, causal=causal, scale=scale)
        self._input_edges, self._output_edge = [get_gradient_edge(i) for i in inputs], get_gradient_edge(out)
        self._out: torch.Tensor | None = out.detach()
        self._extras: list[torch.Tensor] | None = self._saved.release([*values, self._out])

    def take(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output ``[b, heads, s, d]`` and the extras, of which nothing stays here."""
        taken = self._out, self._extras
        self._out = self._extras = None
        return taken  # type: ignore[return-value]

    def backward(
        self, dout: torch.Tensor, values: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Gradients of q, k, v. ``values``: q, k, v and the output, ``[b, heads, s, d]``."""
        with self._saved.given_back(values, extras):
            return torch.autograd.grad([self._output_edge], self._input_edges, [dout], retain_graph=True)


class _Saved:
    """Stands in SDPA's node for the tensors that it saved. Not part of :class:`_Node`, whose references to the
    graph, which refers to this, would close a cycle that Python cannot collect."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[int, tuple[int, ...] | None]] = []

    def pack(self, t: torch.Tensor) -> int:
        self._tensors.append(t)
        return len(self._tensors) - 1

    def release(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Forget all tensors; those that are none of ``values`` are returned."""
        extras: list[torch.Tensor] = []
        for t in self._tensors:
            same = (t.shape == v.shape and t.dtype == v.dtype and t.data_ptr() == v.data_ptr() for v in values)
            found = next((i for i, is_it in enumerate(same) if is_it), None)
            if found is None:
                self._places.append((len(values) + len(extras), None))
                extras.append(t)
            else:
                self._places.append((found, t.stride()))
        self._tensors = []
        return extras

    @contextmanager
    def given_back(self, values: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]) -> Iterator[None]:
        self._tensors = [*values, *extras]
        try:
            yield
        finally:
            self._tensors = []

    def unpack(self, index: int) -> torch.Tensor:
        i, stride = self._places[index]
        t = self._tensors[i]
        if stride is None or t.stride() == stride:
            return t
        # As the kernel had it in forward: the output need not be laid out like the queries.
        return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


class _GradientEdge(torch.autograd.Function):
    """Identity: the edge at which gradients are read. A leaf would do, were it not kept alive by the graph."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        raise AssertionError("gradients are read before this node")


def _compress(x: torch.Tensor, settings: ActivationConfig) -> QuantizedTensor:
    """``[s, b, heads, d]`` by groups within heads; as long rows where that is the same."""
    x = x.flatten(2) if x.shape[-1] % settings.group_size == 0 else x
    return quantize_groups(x, saved_format(settings), settings.group_size, settings.scale)


def _values(q: QuantizedTensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What was compressed, as SDPA takes it: ``[b, heads, s, d]``."""
    return dequantize(q, dtype).view(shape).permute(1, 2, 0, 3)


def _sdpa(q, k, v, *, causal: bool, scale: float | None, dropout: float = 0.0) -> torch.Tensor:
    # cuDNN's answer to no sequences at all is None (torch 2.11); the plain products take any number.
    with _preferred_backend(q.device) if q.numel() else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


_HOPPER_NUMBERS = [int(backend) for backend in _HOPPER_ORDER]  # type: ignore[call-overload]
_get_order: Any = getattr(torch._C, "_get_sdp_priority_order", None)
_set_order: Any = getattr(torch._C, "_set_sdp_priority_order", None)


@contextmanager
def _preferred_backend(device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or not _is_hopper(device):
        yield
    elif _set_order is None or torch.compiler.is_compiling():
        with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
            yield
    else:
        # The order alone, by what sdpa_kernel calls: it also switches each backend on and off again, one by one, which
        # is as much host time as several launches. Backends that the user has switched off stay off. As there, the
        # order is the process's: attention from several threads at a time may leave it changed.
        before = _get_order()
        _set_order([*_HOPPER_NUMBERS, *(b for b in before if b not in _HOPPER_NUMBERS)])
        try:
            yield
        finally:
            _set_order(before)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
