"""norm → column-parallel linear, as one autograd function.

Saved per token: x8 and its group scales, rstd (and mean); per call: the scales of y8 and of the weight. Not saved: y,
y8, any copy of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..config import ActivationConfig
from .norm import Norm, NormedInput, check_normed
from .scaling import TensorParallel, check_input, gemm, quantize_gradient, summed_gemm
from .weights import Weight

__all__ = ["norm_linear"]


def norm_linear(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: TensorParallel,
    settings: ActivationConfig,
) -> torch.Tensor:
    """``norm(x) @ weight.T + bias`` with an FP8 product, split over ranks by output features.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's part of it.
        weight, bias: this rank's ``[n / tp, h]`` and ``[n / tp]``.

    Returns:
        ``[..., n / tp]`` of x's dtype, for the whole sequence.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    check_input(x, weight)
    check_normed(x, norm, tp)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: got shape {list(bias.shape)}, accepted: {list(weight.shape[:1])}")
    return _NormLinear.apply(x, norm.weight, norm.bias, weight, bias, norm, tp, settings)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, norm_weight, norm_bias, weight, bias, norm: Norm, tp: TensorParallel, settings: ActivationConfig
    ) -> torch.Tensor:
        entry, y8 = NormedInput.forward(x.reshape(-1, x.shape[-1]), norm, tp, settings)
        ctx.weight = Weight(weight, tp, settings)
        w8 = ctx.weight.quantized()
        out = gemm(y8, w8, x.dtype, settings, fast_accum=True)
        if bias is not None:
            out += bias
        ctx.save_for_backward(*entry.save(), weight, w8.scales, bias)
        ctx.args = entry.bare(), x.shape
        return out.view(-1, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor):
        *saved, weight, w_scale, bias = ctx.saved_tensors
        bare, shape = ctx.args
        entry = NormedInput.restore(saved, *bare)
        tp, settings = entry.tp, entry.settings
        dx = dnorm_weight = dnorm_bias = dweight = dbias = None
        dout = dout.reshape(-1, weight.shape[0])
        d8, d8_t = quantize_gradient(dout, tp, settings, gather=False)
        if any(ctx.needs_input_grad[:3]):
            dy = summed_gemm(d8, ctx.weight.transposed(weight, w_scale), entry.dtype, tp, settings)
            dx, (dnorm_weight, dnorm_bias) = entry.backward(dy, ctx.needs_input_grad[:3])
            dx = None if dx is None else dx.view(shape)
        if ctx.needs_input_grad[3]:
            dweight = ctx.weight.gradient(d8_t, entry.y8(entry.x8, transpose=True))
        if ctx.needs_input_grad[4]:
            dbias = dout.sum(0, dtype=torch.float64 if settings.tp_invariant else torch.float32).to(bias.dtype)
        return dx, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None
