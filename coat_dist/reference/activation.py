"""Activations between fc1 and fc2 around quantized tensors: ``a = act(gate) * up``, or ``a =
act(p)`` without a gate.

``pre`` is what fc1 writes: with a gate ``[..., 2 f]``, the gates, then the ups, or both in turn
where the activation is ``interleaved``; without one ``[..., f]``. fc1's bias is added here, in
fp32. Its FP8 form, codes ``[..., parts, f]`` with 2 parts or 1, is taken after the bias and keeps
gate and up apart, so that no group spans both. All arithmetic is fp32.

Forward and backward take two passes each, because a per-tensor scale is known only when the whole
tensor has been seen: one pass for the amax, one that writes codes. Backward's second pass also
writes ``a`` again, transposed, for wgrad, so that nothing of size f is kept but the pre-activation
in FP8 (COAT section 5.2). With a scale per row forward takes one pass,
:func:`activation_compress_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..formats import FP8Format, QuantizedTensor
from .grouped import BLOCK, ExpertRows, factor_of_rows, largest_rows, scale_of_rows
from .quantize import (
    amax,
    amaxes,
    dequantize,
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    requantize_rows,
)


class Activation(NamedTuple):
    """``gated``: ``function(gate) * (up + offset)``; otherwise ``function(p)``. ``function`` is a
    key of :data:`FUNCTIONS`.
    """

    function: str
    gated: bool
    limit: float = math.inf
    """The gate is clamped to at most this, up to both sides. Gradients are zero outside, as those
    of ``torch.clamp``. Megatron's ``activation_func_clamp_value``.
    """
    offset: float = 0.0
    """Megatron's ``glu_linear_offset``."""
    interleaved: bool = False
    """Gate and up alternate in the columns that fc1 writes, and so do their gradients."""

    @property
    def parts(self) -> int:
        """Tensors of size f that fc1 writes."""
        return 2 if self.gated else 1


class ActivationForward(NamedTuple):
    """What the first pass finds: the pre-activation in per-group FP8 and the amax of a (fp32
    scalar).
    """

    pre8: QuantizedTensor
    amax: torch.Tensor


class ActivationRows(NamedTuple):
    """What the one pass with row scales finds: the pre-activation in per-group FP8 and a in
    row-wise FP8.
    """

    pre8: QuantizedTensor
    a8: QuantizedTensor


class ActivationGradients(NamedTuple):
    """What backward's second pass writes, per-tensor FP8: ``d8`` ``[rows, parts f]`` is the
    gradient of pre, ``d8_t`` ``[parts f, rows]`` the same codes transposed, ``a8_t`` ``[f, rows]``
    the activation again, transposed. ``dbias`` ``[parts f]`` is the sum over rows of the gradient
    before it is quantized; None where not asked for.
    """

    d8: QuantizedTensor
    d8_t: QuantizedTensor
    a8_t: QuantizedTensor
    dbias: torch.Tensor | None


def _silu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(g)
    return g * s, s * (1.0 + g * (1.0 - s))


def _gelu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf = 0.5 * (1.0 + torch.erf(g * math.sqrt(0.5)))
    return g * cdf, cdf + g * torch.exp(-0.5 * g * g) * (1.0 / math.sqrt(2.0 * math.pi))


def _gelu_tanh(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    c, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = torch.tanh(c * g * (1.0 + cubic * g * g))
    slope = c * (1.0 + 3.0 * cubic * g * g)
    return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope


def _quick_gelu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(1.702 * g)
    return g * s, s * (1.0 + 1.702 * g * (1.0 - s))


def _squared_relu(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r = g.clamp(min=0.0)  # keeps NaN
    return r * r, 2.0 * r


FUNCTIONS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}
"""Name -> function of a tensor (fp32) that returns its value and its derivative. "gelu" is the
exact GELU (erf).
"""

ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation("silu", True),
    "geglu": Activation("gelu", True),
    "geglu_tanh": Activation("gelu_tanh", True),
    "quick_geglu": Activation("quick_gelu", True),
    "clamped_swiglu": Activation("silu", True, 10.0),  # DeepSeek-V4
    "clamped_quick_geglu": Activation("quick_gelu", True, 7.0, 1.0),  # MiniMax-M3
    "interleaved_quick_geglu": Activation("quick_gelu", True, 7.0, 1.0, True),  # gpt-oss
    "gelu": Activation("gelu", False),
    "gelu_tanh": Activation("gelu_tanh", False),
    "quick_gelu": Activation("quick_gelu", False),
    "squared_relu": Activation("squared_relu", False),
}
"""The activations that can be asked for, by the names that the functions below take."""


def check_activation(name: str) -> Activation:
    """What ``name`` stands for.

    Raises:
        ValueError: an unknown name; lists what is accepted.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, accepted: {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def activation_apply(
    pre: torch.Tensor | QuantizedTensor, activation: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """a, fp32 ``[..., f]``, from either form of the pre-activation.

    Args:
        bias: fc1's, ``[parts f]``; added to plain values. The FP8 form holds it already and takes
            None.
    """
    first, *up = _parts(pre, activation, bias)
    act = ACTIVATIONS[activation]
    value, _ = _gate(first, act)
    return value * _linear(up[0], act)[0] if up else value


def activation_compress(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
    saved: FP8Format | None = None,
) -> ActivationForward:
    """First pass over pre ``[..., parts f]``.

    Args:
        fmt: of the activation, and of the saved pre-activation unless ``saved`` names another.
        exact: amax of a from pre + bias; otherwise from its FP8 values.
        saved: format of the pre-activation.
    """
    pre8, a = _compressed(pre, activation, saved or fmt, group_size, scale, exact, bias)
    return ActivationForward(pre8, amax(a))


def activation_compress_rows(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
    saved: FP8Format | None = None,
    blocks: torch.Tensor | None = None,
) -> ActivationRows:
    """:func:`activation_compress`, and a in FP8 as
    :func:`~coat_dist.reference.quantize.quantize_rows` makes it, with scales that are powers of
    two.

    Args:
        blocks: the expert of each block of rows (:class:`~coat_dist.ops.ExpertRows`); ``bias`` is
            ``[experts, parts f]``.
    """
    if bias is not None and blocks is not None:
        bias = bias[blocks.long()].repeat_interleave(len(pre) // len(blocks), 0)
    pre8, a = _compressed(pre, activation, saved or fmt, group_size, scale, exact, bias)
    return ActivationRows(pre8, quantize_rows(a, fmt, aligned=True))


def activation_quantize(
    pre: torch.Tensor | QuantizedTensor,
    activation: str,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    bias: torch.Tensor | None = None,
) -> QuantizedTensor:
    """a in per-tensor FP8 with the given scale; codes ``[..., f]``, or ``[f, rows]`` if
    ``transpose``.

    ``bias`` as in :func:`activation_apply`.
    """
    return quantize_tensor(activation_apply(pre, activation, bias), fmt, scale, transpose)


def activation_grad_amax(
    da: torch.Tensor, pre8: QuantizedTensor, activation: str, rows: ExpertRows | None = None
) -> torch.Tensor:
    """Backward's first pass: the amax (fp32 scalar) of the gradient of pre, given da ``[...,
    f]``; with ``rows`` that of each expert's rows, ``[experts]``.
    """
    gradient = _gradient(da, pre8, activation)
    if rows is None:
        return amax(gradient)
    return largest_rows(amaxes(gradient, -1)[:, None], rows, 0.0)


def activation_factor_grad(
    da: torch.Tensor,
    pre8: QuantizedTensor,
    activation: str,
    rows: ExpertRows,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`activation_grad_amax` of each expert's rows, and the gradient of ``factor``.

    Args:
        da: the gradient of ``factor * a``, which is what the expert's output is linear in.
        factor: of any floating dtype, one for each of what ``rows.source`` counts.

    Returns:
        amax fp32 ``[experts]``; the gradient, of the shape and dtype of ``factor``, zero where a
        choice has no row.
    """
    there = rows.source >= 0
    dfactor = da.new_zeros(factor.numel(), dtype=torch.float32)
    products = (da.float() * activation_apply(pre8, activation)).sum(-1)
    dfactor[rows.source[there].long()] = products[there]
    top = activation_grad_amax(da.float() * factor_of_rows(factor, rows), pre8, activation, rows)
    return top, dfactor.view(factor.shape).to(factor.dtype)


def activation_backward(
    da: torch.Tensor,
    pre8: QuantizedTensor,
    activation: str,
    grad_fmt: FP8Format,
    grad_scale: torch.Tensor,
    fmt: FP8Format,
    scale: torch.Tensor,
    bias_sum: torch.dtype | None = None,
    rows: ExpertRows | None = None,
    factor: torch.Tensor | None = None,
    d8_t: torch.Tensor | None = None,
) -> ActivationGradients:
    """Backward's second pass.

    Args:
        da: gradient of a, ``[rows, f]``.
        grad_fmt, grad_scale: of the gradient of pre.
        fmt, scale: of a, as in forward.
        bias_sum: dtype in which the gradient of fc1's bias is summed over rows; None = there is
            none to sum.
        rows: whose rows these are; scales are those of experts, ``[experts]``, and so is the
            gradient of the bias, ``[experts, parts f]``.
        factor: as in :func:`activation_factor_grad`; ``factor * a`` is the activation.
        d8_t: takes the transposed codes ``[parts f, rows]``: whole columns of a wider contiguous
            matrix.
    """
    a = activation_apply(pre8, activation)
    layout, grad_scales, scales = "tensor", grad_scale, scale
    if rows is not None:
        layout = "expert"
        grad_scales, scales = scale_of_rows(grad_scale, rows), scale_of_rows(scale, rows)
        if factor is not None:
            times = factor_of_rows(factor, rows)
            da, a = da.float() * times, a * times
    gradient = _gradient(da, pre8, activation)
    dbias = None if bias_sum is None else gradient.sum(0, dtype=bias_sum)
    if rows is not None and bias_sum is not None:
        owner = rows.blocks.repeat_interleave(BLOCK)
        dbias = gradient.new_zeros(rows.experts, gradient.shape[1], dtype=bias_sum)
        dbias.index_add_(0, owner, gradient.to(bias_sum))
    d8 = requantize_rows(gradient, grad_fmt, grad_scales).codes
    turned = d8.t().contiguous()
    if d8_t is not None:
        turned = d8_t.copy_(turned)
    a8 = requantize_rows(a, fmt, scales).codes
    return ActivationGradients(
        QuantizedTensor(d8, grad_scale, layout),
        QuantizedTensor(turned, grad_scale, layout),
        QuantizedTensor(a8.t().contiguous(), scale, layout),
        dbias,
    )


def _compressed(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None,
) -> tuple[QuantizedTensor, torch.Tensor]:
    """The pre-activation in FP8, and a (fp32) from the side that ``exact`` names."""
    pre8 = quantize_groups(torch.stack(_parts(pre, activation, bias), -2), fmt, group_size, scale)
    return pre8, activation_apply(pre, activation, bias) if exact else activation_apply(
        pre8, activation
    )


def _parts(
    pre: torch.Tensor | QuantizedTensor, activation: str, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """fp32 ``[..., f]`` each: gate and up, or the one tensor of an activation without a gate."""
    if isinstance(pre, QuantizedTensor):  # holds the bias
        return dequantize(pre).unbind(-2)
    values = pre.float() if bias is None else pre.float() + bias.float()
    act = ACTIVATIONS[activation]
    return gates_first(values, act).unflatten(-1, (act.parts, -1)).unbind(-2)


def gates_first(t: Any, act: Activation) -> Any:
    """What fc1 writes or adds, ``[..., parts f]``, with all gates before all ups; None of None."""
    if t is None or not act.interleaved:
        return t
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _gate(first: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and derivative of the function."""
    value, slope = FUNCTIONS[act.function](first.clamp(max=act.limit))
    return value, slope.masked_fill(first > act.limit, 0.0)


def _linear(up: torch.Tensor, act: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gate's value is multiplied by, and its derivative."""
    value = up.clamp(-act.limit, act.limit)
    if act.offset:  # else -0.0 would become another zero
        value = value + act.offset
    return value, torch.where(up.abs() > act.limit, 0.0, 1.0)


def _gradient(da: torch.Tensor, pre8: QuantizedTensor, activation: str) -> torch.Tensor:
    """fp32 ``[..., parts f]``."""
    act, da = ACTIVATIONS[activation], da.float()
    first, *up = _parts(pre8, activation)
    value, slope = _gate(first, act)
    if not up:
        return da * slope
    by, by_slope = _linear(up[0], act)
    both = da * by * slope, da * value * by_slope
    return torch.stack(both, -1 if act.interleaved else -2).flatten(-2)
