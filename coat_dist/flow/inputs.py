"""What enters a block: the input of its column-parallel FP8 linear, what is saved of it, and its
backward.

A block begins with a norm (:class:`NormedInput`) or without (:class:`PlainInput`): an expert, whose
tokens come from the router, or a block with the norm behind it. Both have the same methods:
``forward`` makes the FP8 tensor that the linear reads, called y8; ``save`` and ``options`` say what
backward needs; ``y8(x8, transpose=True)`` makes wgrad's operand again; ``backward`` turns the
gradient of the linear's input into that of x. :func:`quantized_input` and :func:`restore_input`
choose.

**With a norm** the linear reads y = norm(x). Backward needs y8 again for wgrad, and x for the
gradient of the norm. Both come from what is saved: x in per-group FP8 (x8; of LayerNorm x less its
mean), rstd and the per-tensor scale of y8. ``y8()`` is the one function that makes per-tensor y8
out of a source, so in "quantized" mode, where forward's source is x8 too, backward gets the same
bytes. In "exact" mode forward's source is x itself and backward's differs by x8's rounding; the
scale is forward's, so what the rounding carries beyond it saturates. With row scales forward's y8
comes out of the pass that reads x, and its bytes are its own; the scale for backward is the same.

**Without a norm** y is x. What is saved is x in per-tensor FP8 (x8), one byte an element. With
per-tensor scales the linear reads it too: backward multiplies the very codes of forward in both
forward modes. With row scales the linear reads codes of its own, made of the same x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import ActivationConfig
from ..formats import QuantizedTensor, fp8_format
from ..ops import (
    NormStats,
    amax,
    dequantize,
    norm_apply,
    norm_backward,
    norm_compress,
    norm_compress_rows,
    norm_quantize,
    quantize_rows,
    quantize_tensor,
)
from ..ops import transpose as transposed
from .blocks.norm import Norm, ParameterGrads, finish_grads
from .parallel.overlap import Rows
from .parallel.tensor_parallel import Pending, TensorParallel
from .scaling import (
    gather_operand,
    reserve_codes,
    reserve_rows,
    row_operand,
    saved_format,
    shared_scale,
    whole,
)

__all__ = [
    "NormedInput",
    "PlainInput",
    "check_normed",
    "quantized_input",
    "residual_alias",
    "restore_input",
]


@dataclass
class NormedInput:
    """The input side of a column-parallel linear: what is saved of it, and y8 from that. x is
    seen as ``[rows, h]``.
    """

    x8: QuantizedTensor
    stats: NormStats
    scale: torch.Tensor
    """Per-tensor scale of y8, fp32 scalar: the same in forward and backward. With row scales the
    largest of them.
    """
    norm: Norm
    tp: TensorParallel
    settings: ActivationConfig
    dtype: torch.dtype
    """Of x: what y is gathered in where FP8 gathers are off, and the dtype of dx."""

    @classmethod
    def forward(
        cls, x: torch.Tensor, norm: Norm, tp: TensorParallel, settings: ActivationConfig
    ) -> tuple[NormedInput, QuantizedTensor | Rows]:
        """From x ``[rows, h]``: what to save, and y8 ``[all rows, h]``; sequence parallelism
        gathers the rows.

        Give y8 to :meth:`received` after the product.
        """
        fmt, exact = fp8_format(settings.format), settings.forward == "exact"
        groups = settings.group_size, settings.scale
        given = (
            x,
            norm.kind,
            norm.eps,
            norm.weight,
            norm.bias,
            fmt,
            *groups,
            exact,
            saved_format(settings),
        )
        if settings.forward_scales == "row":
            if tp.sharded and not settings.fp8_gather:
                x8, stats, _ = norm_compress(*given)
                y = norm_apply(x if exact else x8, stats, norm.weight, norm.bias).to(x.dtype)
                rows: QuantizedTensor | Rows = quantize_rows(tp.gather_rows(y), fmt, aligned=True)
            else:
                x8, stats, y8 = norm_compress_rows(*given, reserve_rows(x, fmt, tp, settings))
                rows = gather_operand(y8, tp, settings) if tp.sharded else y8
            return cls(x8, stats, rows.scales, norm, tp, settings, x.dtype), rows
        found = norm_compress(*given)
        scale = shared_scale(found.amax, fmt, tp, tp.sharded)
        this = cls(found.x8, found.stats, scale, norm, tp, settings, x.dtype)
        return this, this.y8(x if exact else found.x8).wait()

    def received(self, y8: QuantizedTensor | Rows) -> None:
        """All rows of y8 are here: with row scales the largest is backward's."""
        if self.settings.forward_scales == "row":
            self.scale = row_operand(whole(y8), self.tp, self.settings).scale

    def y8(
        self, source: torch.Tensor | QuantizedTensor, transpose: bool = False
    ) -> Pending[QuantizedTensor]:
        """y in per-tensor FP8 from x or x8: codes ``[all rows, h]``, or ``[h, all rows]`` if
        ``transpose``.

        A gather is under way; where there is none, nothing is computed before the result is asked
        for.
        """
        fmt, scale = fp8_format(self.settings.format), self.scale
        parameters = self.norm.weight, self.norm.bias
        if not self.tp.sharded:
            return Pending(
                lambda: norm_quantize(source, self.stats, *parameters, fmt, scale, transpose)
            )
        if not self.settings.fp8_gather:
            y = norm_apply(source, self.stats, *parameters).to(self.dtype)
            return self.tp.start_gather(y).then(
                lambda t: quantize_tensor(t[0], fmt, scale, transpose)
            )
        x = source if isinstance(source, torch.Tensor) else source.codes
        room = reserve_codes(x, fmt, self.tp, self.settings)
        local = norm_quantize(source, self.stats, *parameters, fmt, scale, out=room)
        return _gathered(self.tp, local.codes, scale, transpose)

    def backward(
        self, dy: torch.Tensor, wanted: tuple[bool, ...], residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        """Gradients of x (``[rows, h]``) and of the norm's parameters; ``wanted`` says for x,
        weight, bias which.

        ``residual`` is what x's alias received (:func:`residual_alias`), in any shape; x's gradient
        includes it.
        """
        sum_dtype = torch.float64 if self.settings.tp_invariant else torch.float32
        weight, bias = self.norm.weight, self.norm.bias
        rows = None if residual is None else residual.reshape(dy.shape)
        dx, dweight, dbias = norm_backward(
            dy,
            self.x8,
            self.norm.kind,
            self.stats,
            weight,
            sum_dtype,
            self.dtype,
            bias is not None,
            rows,
        )
        grads = finish_grads(dweight, dbias, weight, bias, wanted[1:], self.norm, self.tp)
        return dx if wanted[0] else None, grads

    def save(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors for ``save_for_backward``, six of them, parameters included. x8 needs no mean."""
        return (
            self.x8.codes,
            self.x8.scales,
            self.stats.rstd,
            self.scale,
            self.norm.weight,
            self.norm.bias,
        )

    def options(self) -> tuple[Norm, TensorParallel, ActivationConfig, torch.dtype]:
        """All else, for the autograd context; no tensor among it."""
        return self.norm.without_parameters(), self.tp.for_backward, self.settings, self.dtype

    @classmethod
    def restore(
        cls,
        saved: tuple,
        norm: Norm,
        tp: TensorParallel,
        settings: ActivationConfig,
        dtype: torch.dtype,
    ) -> NormedInput:
        """The inverse of :meth:`save` and :meth:`options`."""
        codes, scales, rstd, scale, weight, bias = saved
        return cls(
            QuantizedTensor(codes, scales, "group", settings.group_size),
            NormStats(rstd, None),
            scale,
            replace(norm, weight=weight, bias=bias),
            tp,
            settings,
            dtype,
        )


@dataclass
class PlainInput:
    """What is saved of x, seen as ``[rows, h]``, and the linear's input from it."""

    x8: QuantizedTensor
    """Layout "tensor": this rank's rows, with one scale on all ranks."""
    tp: TensorParallel
    settings: ActivationConfig
    dtype: torch.dtype
    """Of x: what it is gathered in where FP8 gathers are off."""

    @classmethod
    def forward(
        cls, x: torch.Tensor, tp: TensorParallel, settings: ActivationConfig
    ) -> tuple[PlainInput, QuantizedTensor]:
        """From x ``[rows, h]``: what to save, and the linear's input ``[all rows, h]``, gathered
        if they are split.
        """
        fmt = fp8_format(settings.format)
        if settings.forward_scales == "row":
            if tp.sharded and settings.fp8_gather:
                y8 = whole(gather_operand(quantize_rows(x, fmt, aligned=True), tp, settings))
            else:
                y8 = quantize_rows(tp.gather_rows(x) if tp.sharded else x, fmt, aligned=True)
            y8, scale = row_operand(y8, tp, settings)
            return cls(quantize_tensor(x, fmt, scale), tp, settings, x.dtype), y8
        this = cls(
            quantize_tensor(x, fmt, shared_scale(amax(x), fmt, tp, tp.sharded)),
            tp,
            settings,
            x.dtype,
        )
        return this, this.y8(this.x8).wait()

    def received(self, y8: QuantizedTensor | Rows) -> None:
        """As :meth:`NormedInput.received`; all rows were waited for."""

    def y8(self, source: QuantizedTensor, transpose: bool = False) -> Pending[QuantizedTensor]:
        """As :meth:`NormedInput.y8`: codes ``[all rows, h]``, or ``[h, all rows]`` if
        ``transpose``.
        """
        if not self.tp.sharded:
            return Pending(lambda: transposed(source) if transpose else source)
        if not self.settings.fp8_gather:  # rounding to BF16 and back gives the same codes
            fmt, scale = fp8_format(self.settings.format), source.scales
            x = dequantize(source).to(self.dtype)
            return self.tp.start_gather(x).then(
                lambda t: quantize_tensor(t[0], fmt, scale, transpose)
            )
        return _gathered(self.tp, source.codes, source.scales, transpose)

    def backward(
        self, dy: torch.Tensor, wanted: tuple[bool, ...], residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        assert residual is None  # nobody makes an alias of what has no norm before it
        return dy if wanted[0] else None, ParameterGrads(None, None)

    def save(self) -> tuple[torch.Tensor, ...]:
        """Tensors for ``save_for_backward``."""
        return self.x8.codes, self.x8.scales

    def options(self) -> tuple[None, TensorParallel, ActivationConfig, torch.dtype]:
        """All else, for the autograd context; no tensor among it."""
        return None, self.tp.for_backward, self.settings, self.dtype


def _gathered(
    tp: TensorParallel, codes: torch.Tensor, scale: torch.Tensor, transpose: bool
) -> Pending[QuantizedTensor]:
    """All ranks' rows of codes with one scale, under way; transposed when they have come."""

    def finish(tensors: tuple[torch.Tensor, ...]) -> QuantizedTensor:
        q8 = QuantizedTensor(tensors[0], scale, "tensor")
        return transposed(q8) if transpose else q8

    return tp.start_gather(codes).then(finish)


def quantized_input(
    x: torch.Tensor, norm: Norm | None, tp: TensorParallel, settings: ActivationConfig
) -> tuple[NormedInput | PlainInput, QuantizedTensor | Rows]:
    """From x ``[rows, h]``, with the norm or without: what backward needs, and the FP8 tensor
    that the linear reads.
    """
    if norm is None:
        return PlainInput.forward(x, tp, settings)
    return NormedInput.forward(x, norm, tp, settings)


def restore_input(saved: Any, norm: Norm | None, *rest: Any) -> NormedInput | PlainInput:
    """In backward: the object that ``save()`` and ``options()`` were taken of."""
    if norm is None:
        codes, scales = saved
        return PlainInput(QuantizedTensor(codes, scales, "tensor"), *rest)
    return NormedInput.restore(saved, norm, *rest)


def check_normed(x: torch.Tensor, norm: Norm, tp: TensorParallel) -> None:
    """Raises ValueError where a norm cannot feed a column-parallel linear."""
    norm.check(x.shape[-1])
    if norm.reduce_grad and tp.size > 1 and not tp.sequence_parallel:
        raise ValueError(
            "norm.reduce_grad: got true without sequence parallelism, accepted: false there, "
            "because every rank "
            "already has the complete gradient after the linear's dgrad is summed"
        )


def residual_alias(x: torch.Tensor, residual: bool) -> bool:
    """Whether a function of x is to return an alias of x that takes part in its backward: where
    x gets a gradient.
    """
    return residual and torch.is_grad_enabled() and x.requires_grad
