"""Norms: on their own in BF16, and as the input side of a column-parallel FP8 linear.

:class:`NormedInput` is that input side. The linear reads y = norm(x) in FP8 (y8). Backward needs y8 again for wgrad,
and x for the gradient of the norm. Both come from what is saved: x in per-group FP8 (x8; of LayerNorm x less its mean),
rstd and the per-tensor scale of y8. ``y8()`` is the one function that makes per-tensor y8 out of a source, so in
"quantized" mode, where forward's source is x8 too, backward gets the same bytes. In "exact" mode forward's source is x
itself and backward's differs by x8's rounding; the scale is forward's, so what the rounding carries beyond it
saturates. With row scales forward's y8 comes out of the pass that reads x, and its bytes are its own; the scale for
backward is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..config import ActivationConfig
from ..formats import QuantizedTensor, fp8_format
from ..ops.norm import (
    NormStats,
    norm_apply,
    norm_backward,
    norm_compress,
    norm_compress_rows,
    norm_forward,
    norm_quantize,
)
from ..ops.quantize import quantize_rows, quantize_tensor
from ..ops.quantize import transpose as transposed
from .function import without_autocast
from .scaling import TensorParallel, row_operand, shared_scale

__all__ = ["Norm", "NormedInput", "norm"]


@dataclass(frozen=True)
class Norm:
    """One normalization and its parameters."""

    kind: Literal["rmsnorm", "layernorm"]
    eps: float
    weight: torch.Tensor | None = None
    """``[h]``; None = no affine part."""
    bias: torch.Tensor | None = None
    reduce_grad: bool = False
    """Sum the gradients of weight and bias over ``tp.group`` inside backward, before they are rounded: for parameters
    that every rank holds while each sees only some of the rows."""

    def bare(self) -> Norm:
        """Itself without parameters, for an autograd context: tensors belong into ``save_for_backward``."""
        return replace(self, weight=None, bias=None)

    def check(self, hidden: int) -> None:
        """Raises ValueError where kind, weight or bias do not fit x ``[..., hidden]``."""
        if self.kind not in ("rmsnorm", "layernorm"):
            raise ValueError(f"norm.kind: got {self.kind!r}, accepted: 'rmsnorm', 'layernorm'")
        if self.bias is not None and self.weight is None:
            raise ValueError("norm.bias: got a bias without a weight, accepted: both, or a weight alone, or neither")
        for name, t in (("weight", self.weight), ("bias", self.bias)):
            if t is not None and t.shape != (hidden,):
                raise ValueError(f"norm.{name}: got shape {list(t.shape)}, accepted: [{hidden}]")


class ParameterGrads(NamedTuple):
    """Gradients of a norm's weight and bias, each None where not wanted."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


def norm(x: torch.Tensor, norm: Norm, tp: TensorParallel, exact: bool = False) -> torch.Tensor:
    """Normalize x ``[..., h]`` without FP8; returns the dtype of x.

    Saves an alias of x and the row statistics.

    Args:
        exact: sum the parameters' gradients in fp64, so that they do not depend on how rows are spread over ranks.

    Raises:
        ValueError: the norm's kind or parameters do not fit x.
    """
    norm.check(x.shape[-1])
    return _NormFunction.apply(x, norm.weight, norm.bias, norm, tp, exact)


class _NormFunction(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x, weight, bias, norm: Norm, tp: TensorParallel, exact: bool) -> torch.Tensor:
        y, stats = norm_forward(x, norm.kind, norm.eps, weight, bias)
        ctx.save_for_backward(x, weight, bias, *stats)
        ctx.args = norm.bare(), tp, exact
        return y

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dy: torch.Tensor):
        x, weight, bias, *stats = ctx.saved_tensors
        norm, tp, exact = ctx.args
        sum_dtype = torch.float64 if exact else torch.float32
        dx, dweight, dbias = norm_backward(
            dy, x, norm.kind, NormStats(*stats), weight, sum_dtype, x.dtype, bias is not None
        )
        grads = finish_grads(dweight, dbias, weight, bias, ctx.needs_input_grad[1:3], norm, tp)
        return dx if ctx.needs_input_grad[0] else None, *grads, None, None, None


def finish_grads(
    dweight: torch.Tensor,
    dbias: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: tuple[bool, ...],
    norm: Norm,
    tp: TensorParallel,
) -> ParameterGrads:
    """Sum gradients over ranks where the norm asks for it, in one collective; round them to the parameters' dtypes."""
    if norm.reduce_grad and any(wanted):
        if dbias is None:
            dweight = tp.sum(dweight)
        else:
            dweight, dbias = tp.sum(torch.stack([dweight, dbias])).unbind()
    return ParameterGrads(
        dweight.to(weight.dtype) if weight is not None and wanted[0] else None,
        dbias.to(bias.dtype) if dbias is not None and bias is not None and wanted[1] else None,
    )


@dataclass
class NormedInput:
    """The input side of a column-parallel linear: what is saved of it, and y8 from that. x is seen as ``[rows, h]``."""

    x8: QuantizedTensor
    stats: NormStats
    scale: torch.Tensor
    """Per-tensor scale of y8, fp32 scalar: the same in forward and backward. With row scales the largest of them."""
    norm: Norm
    tp: TensorParallel
    settings: ActivationConfig
    dtype: torch.dtype
    """Of x: what y is gathered in where FP8 gathers are off, and the dtype of dx."""

    @classmethod
    def forward(
        cls, x: torch.Tensor, norm: Norm, tp: TensorParallel, settings: ActivationConfig
    ) -> tuple[NormedInput, QuantizedTensor]:
        """From x ``[rows, h]``: what to save, and y8 ``[all rows, h]``; sequence parallelism gathers the rows."""
        fmt, exact = fp8_format(settings.format), settings.forward == "exact"
        given = x, norm.kind, norm.eps, norm.weight, norm.bias, fmt, settings.group_size, settings.scale, exact
        if settings.forward_scales == "row":
            if tp.sharded and not settings.fp8_gather:
                x8, stats, _ = norm_compress(*given)
                y = norm_apply(x if exact else x8, stats, norm.weight, norm.bias).to(x.dtype)
                y8 = quantize_rows(tp.gather_rows(y), fmt)
            else:
                x8, stats, y8 = norm_compress_rows(*given)
                y8 = tp.gather_quantized(y8) if tp.sharded else y8
            y8, scale = row_operand(y8, tp, settings)
            return cls(x8, stats, scale, norm, tp, settings, x.dtype), y8
        found = norm_compress(*given)
        scale = shared_scale(found.amax, fmt, tp, tp.sharded)
        this = cls(found.x8, found.stats, scale, norm, tp, settings, x.dtype)
        return this, this.y8(x if exact else found.x8)

    def y8(self, source: torch.Tensor | QuantizedTensor, transpose: bool = False) -> QuantizedTensor:
        """y in per-tensor FP8 from x or x8: codes ``[all rows, h]``, or ``[h, all rows]`` if ``transpose``."""
        fmt = fp8_format(self.settings.format)
        parameters = self.norm.weight, self.norm.bias
        if not self.tp.sharded:
            return norm_quantize(source, self.stats, *parameters, fmt, self.scale, transpose)
        if not self.settings.fp8_gather:
            y = self.tp.gather_rows(norm_apply(source, self.stats, *parameters).to(self.dtype))
            return quantize_tensor(y, fmt, self.scale, transpose)
        local = norm_quantize(source, self.stats, *parameters, fmt, self.scale)
        y8 = QuantizedTensor(self.tp.gather_rows(local.codes), self.scale, "tensor")
        return transposed(y8) if transpose else y8

    def backward(
        self, dy: torch.Tensor, wanted: tuple[bool, ...], residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        """Gradients of x (``[rows, h]``) and of the norm's parameters; ``wanted`` says for x, weight, bias which.

        ``residual`` is what x's alias received (:func:`aliased`), in any shape; x's gradient includes it.
        """
        sum_dtype = torch.float64 if self.settings.tp_invariant else torch.float32
        weight, bias = self.norm.weight, self.norm.bias
        rows = None if residual is None else residual.reshape(dy.shape)
        dx, dweight, dbias = norm_backward(
            dy, self.x8, self.norm.kind, self.stats, weight, sum_dtype, self.dtype, bias is not None, rows
        )
        grads = finish_grads(dweight, dbias, weight, bias, wanted[1:], self.norm, self.tp)
        return dx if wanted[0] else None, grads

    def save(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors for ``save_for_backward``, six of them, parameters included. x8 needs no mean."""
        return (self.x8.codes, self.x8.scales, self.stats.rstd, self.scale, self.norm.weight, self.norm.bias)

    def bare(self) -> tuple[Norm, TensorParallel, ActivationConfig, torch.dtype]:
        """The rest, free of tensors."""
        return self.norm.bare(), self.tp, self.settings, self.dtype

    @classmethod
    def restore(
        cls, saved: tuple, norm: Norm, tp: TensorParallel, settings: ActivationConfig, dtype: torch.dtype
    ) -> NormedInput:
        """The inverse of :meth:`save` and :meth:`bare`."""
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


def check_normed(x: torch.Tensor, norm: Norm, tp: TensorParallel) -> None:
    """Raises ValueError where a norm cannot feed a column-parallel linear."""
    norm.check(x.shape[-1])
    if norm.reduce_grad and tp.size > 1 and not tp.sequence_parallel:
        raise ValueError(
            "norm.reduce_grad: got true without sequence parallelism, accepted: false there, because every rank "
            "already has the complete gradient after the linear's dgrad is summed"
        )


def aliased(x: torch.Tensor, residual: bool) -> bool:
    """Whether a function of x is to return an alias of x that takes part in its backward: where x gets a gradient."""
    return residual and torch.is_grad_enabled() and x.requires_grad
