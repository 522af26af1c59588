"""(norm →) fc1 → activation → fc2, as one autograd function, and what an expert does with its
result.

Saved per token: x8 (with group scales and rstd, if there is a norm), the pre-activation in
per-group FP8 (gate and up, or one tensor without a gate); per call: four scales. Not saved: fc1's
output, the activation, any copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...config import ActivationConfig
from ...formats import FORMATS, QuantizedTensor
from ...ops import (
    activation_apply,
    activation_backward,
    activation_compress,
    activation_compress_rows,
    activation_grad_amax,
    activation_quantize,
    check_activation,
    dequantize,
    quantize_groups,
    scale_rows_backward,
    take_rows,
    tensor_scale,
)
from ..core.adapters import ADAPTER, Adapters, Factors, LowRank, joined_adapters
from ..core.input_product import SAVED_OF_PRODUCT, InputProduct, input_product
from ..core.inputs import check_normed, residual_alias
from ..core.norm import Norm, parameters_of
from ..core.products import (
    Operand,
    gemm,
    gradient_amax,
    quantize_gradient,
    row_operand,
    saved_format,
    share_rows,
    shared_scale,
    summed_gemm,
)
from ..core.weights import Weight, Weights, joined, joined_biases, stacked
from ..function import Function, check_settings, shaped
from ..parallel.overlap import rows_of
from ..parallel.tensor_parallel import TensorParallel


def norm_mlp(
    x: torch.Tensor,
    norm: Norm | None,
    fc1_weight: Weights,
    fc2_weight: torch.Tensor,
    activation: str,
    tp: TensorParallel,
    settings: ActivationConfig,
    fc1_bias: Weights | None = None,
    residual: bool = False,
    before_fc2: Callable[[], object] | None = None,
    fc1_adapters: Adapters = (),
    fc2_adapters: Adapters = (),
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """An MLP and the norm before it, with FP8 products, split over ranks by intermediate features.

    A bias of fc2 is not added: it is replicated over ranks, and belongs to the dropout and residual
    that follow.

    Args:
        x: ``[..., h]``, bfloat16 or float32; with sequence parallelism, dimension 0 is this rank's
            part of it.
        fc1_weight: this rank's ``[2 f / tp, h]``: its gate rows, then its up rows, also as two
            weights (gate, up); ``[f / tp, h]`` without a gate.
        fc2_weight: this rank's ``[h, f / tp]``.
        activation: with a gate "swiglu", "geglu" (erf), "geglu_tanh" or "quick_geglu"; without
            "gelu" (erf), "gelu_tanh", "quick_gelu" or "squared_relu".
        fc1_bias: this rank's ``[2 f / tp]`` or ``[f / tp]``, or one for each weight; added in fp32.
        residual: also return x's alias for the residual connection, as
            :func:`~coat_dist.flow.norm_linear` does.
        before_fc2: called before fc2_weight is read, after the product with fc1_weight: what waits
            for its values.
        fc1_adapters, fc2_adapters: those of each weight, on one rank alone.

    Returns:
        The shape and dtype of x; with ``residual`` also the alias.

    Raises:
        ValueError: a shape, dtype or option that does not fit; names the argument.
    """
    if norm is not None:
        check_normed(x, norm, tp)
    weights, biases = _checked(x, fc1_weight, fc1_bias, fc2_weight, activation, tp, settings)
    alias = residual_alias(x, residual)
    first = joined_adapters(x, weights, fc1_adapters, tp)
    second = joined_adapters(x, (fc2_weight,), fc2_adapters, tp)
    call = norm, tp, settings, len(weights), activation, before_fc2, alias
    adapters = *first, *second
    out = _MLP.apply(call, x, *parameters_of(norm), *adapters, fc2_weight, *weights, *biases)
    return out if alias or not residual else (out, x)


def mlp(
    x: torch.Tensor,
    fc1_weight: Weights,
    fc2_weight: torch.Tensor,
    activation: str,
    tp: TensorParallel,
    settings: ActivationConfig,
    fc1_bias: Weights | None = None,
    before_fc2: Callable[[], object] | None = None,
    fc1_adapters: Adapters = (),
    fc2_adapters: Adapters = (),
) -> torch.Tensor:
    """:func:`norm_mlp` without the norm: for experts, whose norm comes before the router, and norms
    after the MLP.

    Saves x in per-tensor FP8; with per-tensor scales these are the codes that fc1 multiplied. Any
    number of tokens will do, also none.
    """
    adapters = fc1_adapters, fc2_adapters
    product = fc1_weight, fc2_weight, activation, tp, settings, fc1_bias
    return norm_mlp(x, None, *product, False, before_fc2, *adapters)  # type: ignore[return-value]


def _checked(x, fc1_weight, fc1_bias, fc2_weight, activation, tp, settings) -> Any:
    """The weights and biases of fc1."""
    check_settings(settings)
    weights, biases = joined(x, fc1_weight, fc1_bias, "fc1_")
    parts = check_activation(activation).parts
    rows, width = sum(weight.shape[0] for weight in weights), fc2_weight.shape[-1]
    if fc2_weight.dim() != 2 or rows != parts * width:
        raise ValueError(
            f"fc2_weight: got shape {list(fc2_weight.shape)}, accepted: [out, {rows}/{parts}], as "
            f"many columns as fc1_weight has rows for each of the {parts} tensors that "
            f"{activation!r} takes"
        )
    if settings.tp_invariant and tp.size > 1 and width % settings.group_size:
        raise ValueError(
            f"fc2_weight: got {width} input features a rank, accepted with tp_invariant: a "
            f"multiple of group_size {settings.group_size}, or groups would depend on the number "
            "of ranks"
        )
    return weights, biases


def _activate(
    pre: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tp: TensorParallel,
    settings: ActivationConfig,
) -> tuple[QuantizedTensor, Operand]:
    """From fc1's output ``[rows, parts f / tp]``: what is saved of it, and a, the input of fc2."""
    fmt, exact = FORMATS[settings.format], settings.forward == "exact"
    saved = saved_format(settings, pre_activation=True)
    given = pre, activation, fmt, settings.group_size, settings.scale, exact, bias, saved
    if settings.forward_scales == "row":
        pre8, a8 = activation_compress_rows(*given)
        source, bias = (pre, bias) if exact else (pre8, None)
        a8 = share_rows(a8, lambda: activation_apply(source, activation, bias), tp, settings)
        return pre8, row_operand(a8, tp, settings)
    pre8, top = activation_compress(*given)
    source, bias = (pre, bias) if exact else (pre8, None)
    scale = shared_scale(top, fmt, tp, settings.tp_invariant)
    return pre8, Operand(activation_quantize(source, activation, fmt, scale, bias=bias), scale)


PIECE = 128
"""Pieces have a multiple of so many rows, as the alignment of kernels and products asks."""


def _pieces(x, tp, settings) -> Any:
    """The first row and the number of rows of each piece that ``tiles`` asks for; none where ranks
    or a scale of forward need all rows together.
    """
    if settings.tiles == 1 or tp.size > 1 or settings.forward_scales == "tensor":
        return ()
    rows = x.numel() // x.shape[-1]
    step = max(1, -(-rows // settings.tiles // PIECE)) * PIECE
    return [(first, min(step, rows - first)) for first in range(0, rows, step)]


def _gradient_in_pieces(ctx, fc1, pre8, a_scale, d8, w2_t) -> list[Any]:
    """The gradient of fc1's output from d8, that of fc2's: an iterator that makes the codes of one
    piece after the other, for dgrad, and the transposed codes of all rows, which it fills.

    The gradient of the activation is computed twice, for its amax and for the codes: whole it would
    be as large as the transposed codes.
    """
    settings = fc1.input.settings
    fmt, grad_fmt = FORMATS[settings.format], FORMATS[settings.grad_format]
    codes: Any = None

    def given(at: Any) -> tuple[Any, Any]:
        return gemm(rows_of(d8, *at), w2_t, fc1.input.dtype, settings), rows_of(pre8, *at)

    tops = [activation_grad_amax(*given(at), ctx.activation) for at in ctx.pieces]
    scale = tensor_scale(torch.stack(tops).amax(), grad_fmt)
    if fc1.wgrad:
        codes = d8.codes.new_empty(pre8.codes[0].numel(), len(d8.codes), dtype=grad_fmt.dtype)

    def codes_of(at: Any) -> QuantizedTensor:
        into = None if codes is None else codes.narrow(1, *at)
        scales = grad_fmt, scale, fmt, a_scale
        return activation_backward(*given(at), ctx.activation, *scales, d8_t=into).d8

    return [map(codes_of, ctx.pieces), QuantizedTensor(codes, scale, "tensor")]


class _MLP(Function):
    saves = (
        *SAVED_OF_PRODUCT,
        *(f"fc2_{name}" for name in ADAPTER),
        "pre_codes",
        "pre_scales",
        "a_scale",
        "fc2_weight",
        "w2_scale",
    )

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple,
        x,
        norm_weight,
        norm_bias,
        a,
        b,
        dropout,
        fc2_a,
        fc2_b,
        fc2_dropout,
        fc2_weight,
        *parameters,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        _, tp, settings, count, activation, before_fc2, alias = call
        adapter, fc2_adapter = LowRank(a, b, dropout), LowRank(fc2_a, fc2_b, fc2_dropout)
        ctx.pieces = ()
        if adapter.a is None and fc2_adapter.a is None:
            ctx.pieces = _pieces(x, tp, settings)
        pre, saved = input_product(_MLP, ctx, call, x, adapter, parameters, ctx.pieces)
        ctx.fc2 = Weight((fc2_weight,), tp, settings, split=True)
        bias = joined_biases(parameters[count:])
        made: list[Any] = []

        def activated(pre):
            pre8, operand = _activate(pre, bias, activation, tp, settings)
            made.append((pre8, operand.scale))
            return operand.q8

        a8: Any = map(activated, pre) if ctx.pieces else activated(pre)
        del pre
        if before_fc2 is not None:
            before_fc2()
        w2, w2_scale = ctx.fc2.quantized()
        out = summed_gemm(a8, w2, x.dtype, tp, settings, fast_accum=True).wait()
        fc2_adapter.add(out, lambda: Factors(dequantize(a8, x.dtype)))
        pre8, a_scale = made[0]
        if ctx.pieces:
            all_pre8, scales = zip(*made, strict=True)
            pre8, a_scale = stacked(all_pre8), torch.stack(scales).amax()
        more = pre8.codes, pre8.scales, a_scale, fc2_weight, w2_scale
        ctx.save_for_backward(*_MLP.Saved(*saved, *fc2_adapter.save(), *more), *parameters)
        ctx.activation = activation
        ctx.set_materialize_grads(False)
        out = shaped(out, *x.shape[:-1], fc2_weight.shape[0])
        return (out, x.view_as(x)) if alias else out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, residual: torch.Tensor | None = None):
        saved, parameters = _MLP.saved(ctx)
        if dout is None:  # the alias alone was used
            return None, residual, *[None] * (9 + len(parameters))
        activation, fc1 = ctx.activation, InputProduct(_MLP, ctx, saved, parameters)
        tp, settings, dtype = fc1.input.tp, fc1.input.settings, fc1.input.dtype
        fmt, grad_fmt = FORMATS[settings.format], FORMATS[settings.grad_format]
        pre8 = QuantizedTensor(saved.pre_codes, saved.pre_scales, "group", settings.group_size)
        fc2_wgrad, fc2_adapter = _MLP.needs(ctx, "fc2_weight"), LowRank.restored(saved, "fc2_")
        dfc2 = None

        dout = dout.reshape(-1, saved.fc2_weight.shape[0])
        fc2_adapter.receive(dout)
        agreed = gradient_amax(dout, tp, settings, gather=True)
        # While ranks agree on the scale.
        w2_t = ctx.fc2.transposed((saved.fc2_weight,), saved.w2_scale)
        d8, d8_t = quantize_gradient(dout, tp, settings, True, agreed, fc2_wgrad)
        if ctx.pieces and fc1.dgrad and fc1.bias_sum is None:
            if fc2_wgrad:
                a8_t = activation_quantize(pre8, activation, fmt, saved.a_scale, transpose=True)
                (dfc2,) = ctx.fc2.gradients(d8_t, a8_t)
                del a8_t, d8_t
            gradient = _gradient_in_pieces(ctx, fc1, pre8, saved.a_scale, d8, w2_t)
            del w2_t, d8
            dinput, dfc1 = fc1.gradients(gradient, fc1.operand(), residual, None)
            return None, *dinput, None, None, None, dfc2, *dfc1
        da = fc2_adapter.add_gradient(gemm(d8, w2_t, dtype, settings))
        del w2_t, d8  # like all that follow: the peak of a step is in this function
        top = activation_grad_amax(da, pre8, activation)
        d_scale = shared_scale(top, grad_fmt, tp, settings.tp_invariant, aligned=False)
        inner: Any = activation_backward(
            da, pre8, activation, grad_fmt, d_scale, fmt, saved.a_scale, fc1.bias_sum
        )
        del da
        sums = inner.dbias
        y8_t = fc1.operand()
        if fc2_wgrad:
            (dfc2,) = ctx.fc2.gradients(d8_t, inner.a8_t)
        dfc2_adapter = fc2_adapter.gradients(lambda: Factors(dequantize(inner.a8_t, dtype).t()))
        gradient, inner = [inner.d8, inner.d8_t], None
        del d8_t
        if fc1.adapter.a is not None:
            fc1.adapter.receive(dequantize(gradient[0], dtype))
        dinput, dfc1 = fc1.gradients(gradient, y8_t, residual, sums)
        return None, *dinput, *dfc2_adapter, dfc2, *dfc1


def scale_rows(y: torch.Tensor, factor: torch.Tensor, settings: ActivationConfig) -> torch.Tensor:
    """``y * factor[..., None]``: an expert's output times the probability that its router gave each
    token.

    The product with fc2 is linear and a bias apart, so this is what multiplying the activation by
    ``factor`` gives, and per-tensor FP8 never sees its spread. Saves y in per-group FP8, for the
    gradient of ``factor`` alone.

    Args:
        y: ``[..., n]``.
        factor: ``[...]``, any floating dtype.

    Returns:
        ``[..., n]`` of y's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    check_settings(settings)
    if factor.shape != y.shape[:-1]:
        raise ValueError(f"factor: got shape {list(factor.shape)}, accepted: {list(y.shape[:-1])}")
    return _ScaleRows.apply(y, factor, settings)


class _ScaleRows(Function):
    saves = "codes", "scales", "factor"

    @staticmethod
    def forward(ctx: Any, y, factor, settings: ActivationConfig) -> torch.Tensor:
        codes = scales = None
        if _ScaleRows.needs(ctx, "factor"):
            y8 = quantize_groups(y, saved_format(settings), settings.group_size, settings.scale)
            codes, scales = y8.codes, y8.scales
        ctx.save_for_backward(*_ScaleRows.Saved(codes, scales, factor))
        ctx.group_size = settings.group_size
        out = take_rows(y.reshape(-1, y.shape[-1]), None, factor.reshape(-1))
        return shaped(out.contiguous(), *y.shape)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor):
        saved, _ = _ScaleRows.saved(ctx)
        n, factor, y8 = dout.shape[-1], saved.factor, None
        if _ScaleRows.needs(ctx, "factor"):
            scales = saved.scales.view(-1, saved.scales.shape[-1])
            y8 = QuantizedTensor(saved.codes.view(-1, n), scales, "group", ctx.group_size)
        dy, dfactor = scale_rows_backward(dout.reshape(-1, n), factor.reshape(-1), y8)
        return dy.view(dout.shape), None if dfactor is None else dfactor.view(factor.shape), None
