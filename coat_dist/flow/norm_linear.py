"""norm → column-parallel linear, as one autograd function; for attention also its split into rotated heads.

Saved per token: x8 and its group scales, rstd (and mean); per call: one scale of y8, one of the weight, and a reference
to the table of cosines and sines, which all layers share. Not saved: y, y8, any copy of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..config import ActivationConfig
from ..ops.rope import Heads, RopeTable, split_rope, split_rope_backward
from .norm import Norm, NormedInput, check_normed
from .scaling import TensorParallel, check_input, gemm, quantize_gradient, summed_gemm
from .weights import Weight

__all__ = ["norm_linear", "norm_qkv"]


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
    _check(x, norm, weight, bias, tp)
    return _NormLinear.apply(x, norm.weight, norm.bias, weight, bias, norm, tp, settings, None, None)


def norm_qkv(
    x: torch.Tensor,
    norm: Norm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: Heads,
    table: RopeTable | None,
    tp: TensorParallel,
    settings: ActivationConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`norm_linear` for attention: queries, keys and values, queries and keys with rotary position embedding.

    Backward takes the amax of the projection's output gradient in the pass that puts it together.

    Args:
        x: ``[s, b, h]``, bfloat16 or float32; with sequence parallelism, this rank's part of dimension 0.
        weight, bias: this rank's ``[heads.width, h]`` and ``[heads.width]``, in the layout of ``reference/rope.py``.
        heads: this rank's heads.
        table: from :func:`~coat_dist.ops.rope.rope_table` for the whole sequence; None without rotary embedding.

    Returns:
        q ``[s, b, groups * per_group, size]``, k and v ``[s, b, groups, size]`` of x's dtype, for the whole sequence,
        each contiguous.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    _check(x, norm, weight, bias, tp)
    if x.dim() != 3:
        raise ValueError(f"x: got shape {list(x.shape)}, accepted: [s, b, h]")
    rows = x.shape[0] * (tp.size if tp.sharded else 1)
    heads.check((rows, x.shape[1], weight.shape[0]), table)
    return _NormLinear.apply(x, norm.weight, norm.bias, weight, bias, norm, tp, settings, heads, table)


def _check(x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel) -> None:
    check_input(x, weight)
    check_normed(x, norm, tp)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: got shape {list(bias.shape)}, accepted: {list(weight.shape[:1])}")


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x, norm_weight, norm_bias, weight, bias, norm: Norm, tp: TensorParallel, settings: ActivationConfig,
        heads: Heads | None, table: RopeTable | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        entry, y8 = NormedInput.forward(x.reshape(-1, x.shape[-1]), norm, tp, settings)
        ctx.weight = Weight(weight, tp, settings)
        w8, w_scale = ctx.weight.quantized()
        out = gemm(y8, w8, x.dtype, settings, fast_accum=True)
        if bias is not None:
            out += bias
        cos, sin = (None, None) if table is None else (table.cos, table.sin)
        ctx.save_for_backward(*entry.save(), weight, w_scale, bias, cos, sin)
        ctx.args = entry.bare(), x.shape, heads, table is not None and table.interleaved
        out = out.view(-1, *x.shape[1:-1], weight.shape[0])
        return out if heads is None else split_rope(out, heads, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: torch.Tensor):
        *saved, weight, w_scale, bias, cos, sin = ctx.saved_tensors
        bare, shape, heads, interleaved = ctx.args
        entry = NormedInput.restore(saved, *bare)
        tp, settings = entry.tp, entry.settings
        dx = dnorm_weight = dnorm_bias = dweight = dbias = None
        if heads is None:
            dout, top = douts[0], None
        else:
            dout, top = split_rope_backward(*douts, heads, None if cos is None else RopeTable(cos, sin, interleaved))
        dout = dout.reshape(-1, weight.shape[0])
        d8, d8_t = quantize_gradient(dout, tp, settings, gather=False, top=top)
        if any(ctx.needs_input_grad[:3]):
            dy = summed_gemm(d8, ctx.weight.transposed(weight, w_scale), entry.dtype, tp, settings)
            dx, (dnorm_weight, dnorm_bias) = entry.backward(dy, ctx.needs_input_grad[:3])
            dx = None if dx is None else dx.view(shape)
        if ctx.needs_input_grad[3]:
            dweight = ctx.weight.gradient(d8_t, entry.y8(entry.x8, transpose=True))
        if ctx.needs_input_grad[4]:
            dbias = dout.sum(0, dtype=torch.float64 if settings.tp_invariant else torch.float32).to(bias.dtype)
        return dx, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None, None, None
