"""The input side of a column-parallel FP8 linear that no norm feeds: tokens on their way to an expert.

Same interface as :class:`~coat_dist.flow.norm.NormedInput`. What is saved is x in per-tensor FP8 (x8), one byte an
element. With per-tensor scales the linear reads it too: backward multiplies the very codes of forward in both forward
modes. With row scales the linear reads codes of its own, made of the same x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import ActivationConfig
from ..formats import QuantizedTensor, fp8_format
from ..ops.quantize import amax, dequantize, quantize_rows, quantize_tensor
from ..ops.quantize import transpose as transposed
from .norm import Norm, NormedInput, ParameterGrads
from .scaling import TensorParallel, row_operand, shared_scale

__all__ = ["PlainInput", "enter", "restore_entry"]


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
        """From x ``[rows, h]``: what to save, and the linear's input ``[all rows, h]``, gathered if they are split."""
        fmt = fp8_format(settings.format)
        if settings.forward_scales == "row":
            if tp.sharded and settings.fp8_gather:
                y8 = tp.gather_quantized(quantize_rows(x, fmt))
            else:
                y8 = quantize_rows(tp.gather_rows(x) if tp.sharded else x, fmt)
            y8, scale = row_operand(y8, tp, settings)
            return cls(quantize_tensor(x, fmt, scale), tp, settings, x.dtype), y8
        this = cls(quantize_tensor(x, fmt, shared_scale(amax(x), fmt, tp, tp.sharded)), tp, settings, x.dtype)
        return this, this.y8(this.x8)

    def y8(self, source: QuantizedTensor, transpose: bool = False) -> QuantizedTensor:
        """The linear's input: codes ``[all rows, h]``, or ``[h, all rows]`` if ``transpose``."""
        if self.tp.sharded and not self.settings.fp8_gather:  # rounding to BF16 and back gives the same codes
            x = self.tp.gather_rows(dequantize(source).to(self.dtype))
            return quantize_tensor(x, fp8_format(self.settings.format), source.scales, transpose)
        codes = self.tp.gather_rows(source.codes) if self.tp.sharded else source.codes
        y8 = QuantizedTensor(codes, source.scales, "tensor")
        return transposed(y8) if transpose else y8

    def backward(
        self, dy: torch.Tensor, wanted: tuple[bool, ...], residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ParameterGrads]:
        assert residual is None  # nobody makes an alias of what has no norm before it
        return dy if wanted[0] else None, ParameterGrads(None, None)

    def save(self) -> tuple[torch.Tensor, ...]:
        """Tensors for ``save_for_backward``."""
        return self.x8.codes, self.x8.scales

    def bare(self) -> tuple[None, TensorParallel, ActivationConfig, torch.dtype]:
        """The rest, free of tensors."""
        return None, self.tp, self.settings, self.dtype


def enter(
    x: torch.Tensor, norm: Norm | None, tp: TensorParallel, settings: ActivationConfig
) -> tuple[NormedInput | PlainInput, QuantizedTensor]:
    """The input side of a linear, with the norm or without, and the FP8 tensor that the linear reads."""
    if norm is None:
        return PlainInput.forward(x, tp, settings)
    return NormedInput.forward(x, norm, tp, settings)


def restore_entry(saved: Any, norm: Norm | None, *rest: Any) -> NormedInput | PlainInput:
    """The inverse of ``save()`` and ``bare()``."""
    if norm is None:
        codes, scales = saved
        return PlainInput(QuantizedTensor(codes, scales, "tensor"), *rest)
    return NormedInput.restore(saved, norm, *rest)
