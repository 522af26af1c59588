"""Row-parallel FP8 linear, and the BF16 output layer that sums the same way on any number of
ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from ...config import ActivationConfig
from ...formats import QuantizedTensor, fp8_format
from ...ops import dequantize, exact_mm, quantize_tensor
from ..function import check_settings, once_differentiable, shaped, without_autocast
from ..parallel.tensor_parallel import TensorParallel
from ..products import check_input, gemm, summed_gemm
from ..scaling import gradient_amax, quantize_gradient, quantize_input
from ..weights import Weight

__all__ = ["invariant_linear", "linear"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tp: TensorParallel,
    settings: ActivationConfig,
    compressed: QuantizedTensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with an FP8 product, split over ranks by input features.

    Saves an alias of x, which its producer keeps anyway (attention keeps its output), and two
    scales.

    Args:
        x: ``[..., k / tp]``, bfloat16 or float32, the whole sequence.
        weight: this rank's ``[n, k / tp]``.
        compressed: x by groups, saved in x's place; x must be exactly what it reads back as
            (:func:`~coat_dist.flow.attention` returns both). Where its scales are powers of two and
            its format is that of the product, codes change exponents and are not rounded again,
            unless they become subnormal.

    Returns:
        ``[..., n]`` of x's dtype, summed over ranks; with sequence parallelism this rank's share of
        dimension 0.

    Raises:
        TypeError: x is no tensor.
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    check_settings(settings)
    if not isinstance(x, torch.Tensor):
        pair = "; flow.attention returns (output, compressed)" if isinstance(x, tuple) else ""
        raise TypeError(f"x: got {type(x).__name__}, accepted: a tensor{pair}")
    check_input(x, weight)
    if tp.sharded and x.shape[0] % tp.size:
        raise ValueError(
            f"x: got a sequence of {x.shape[0]}, accepted: a multiple of {tp.size}, its ranks"
        )
    if compressed is None:
        return _Linear.apply(x, weight, None, None, 0, tp, settings)
    if compressed.layout != "group" or compressed.codes.numel() != x.numel():
        got = f"layout {compressed.layout!r}, {list(compressed.codes.shape)}"
        raise ValueError(
            f"compressed: got {got}, accepted: layout 'group' with the elements of x, "
            f"{list(x.shape)}"
        )
    return _Linear.apply(
        x, weight, compressed.codes, compressed.scales, compressed.group_size, tp, settings
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x,
        weight,
        codes,
        scales,
        group_size: int,
        tp: TensorParallel,
        settings: ActivationConfig,
    ) -> torch.Tensor:
        x8, x_scale = quantize_input(x.reshape(-1, x.shape[-1]), tp, settings, True)
        ctx.weight = Weight(weight, tp, settings, split=True)
        w8, w_scale = ctx.weight.quantized()
        ctx.save_for_backward(x if codes is None else None, weight, x_scale, w_scale, codes, scales)
        ctx.args = x.shape, x.dtype, group_size, tp.for_backward, settings
        out = summed_gemm(x8, w8, x.dtype, tp, settings, fast_accum=True).wait()
        return shaped(
            out, x.shape[0] // (tp.size if tp.sharded else 1), *x.shape[1:-1], weight.shape[0]
        )

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dout: torch.Tensor):
        x, weight, x_scale, w_scale, codes, scales = ctx.saved_tensors
        shape, dtype, group_size, tp, settings = ctx.args
        dx = dweight = None
        dout = dout.reshape(-1, weight.shape[0])
        top = gradient_amax(dout, tp, settings, gather=True)
        # While ranks agree on the scale.
        w8_t = ctx.weight.transposed(weight, w_scale) if ctx.needs_input_grad[0] else None
        d8, d8_t = quantize_gradient(dout, tp, settings, gather=True, top=top)
        if w8_t is not None:
            dx = gemm(d8, w8_t, dtype, settings).view(shape)
        del w8_t
        del d8
        if ctx.needs_input_grad[1]:
            if codes is not None:
                x = dequantize(QuantizedTensor(codes, scales, "group", group_size), dtype).view(
                    shape
                )
            x8_t = quantize_tensor(x, fp8_format(settings.format), x_scale, transpose=True)
            dweight = ctx.weight.gradient(d8_t, x8_t)
        return dx, dweight, None, None, None, None, None


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """``x @ weight.T`` without FP8, split over ranks by output features, with sums in fp64.

    For the output layer where losses must not depend on the tensor-parallel size: every product and
    the sum of dgrad over ranks are rounded once (fp32, then the dtype of x or weight). Slow on
    GPUs; meant for verification.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        weight: this rank's ``[n / tp, h]``.

    Returns:
        ``[..., n / tp]`` of x's dtype, for the whole sequence.

    Raises:
        ValueError: a shape or dtype that does not fit; names the argument.
    """
    check_input(x, weight)
    return _InvariantLinear.apply(x, weight, tp)


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x, weight, tp: TensorParallel) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp = tp
        out = exact_mm(tp.all_rows(x), weight)
        leading = (x.shape[0] * (tp.size if tp.sharded else 1), *x.shape[1:-1])
        return shaped(out.float().to(x.dtype), *leading, weight.shape[0])

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dout: torch.Tensor):
        x, weight = ctx.saved_tensors
        tp = ctx.tp
        dx = dweight = None
        dout = dout.reshape(-1, weight.shape[0])
        if ctx.needs_input_grad[0]:
            partial = exact_mm(dout, weight.t())
            total = tp.reduce_scatter_rows(partial) if tp.sharded else tp.sum(partial)
            dx = total.float().to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = exact_mm(dout.t(), tp.all_rows(x).t()).float().to(weight.dtype)
        return dx, dweight, None
