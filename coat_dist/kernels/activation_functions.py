"""Device functions that the activation kernels of forward and backward share: the activations with
their derivatives, and the parts of a pre-activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.activation import ACTIVATIONS, Activation
from .approximations import exp2, sigmoid
from .fp8 import Format
from .groups import load_tile


class Pre(NamedTuple):
    """A pre-activation as compile-time constants. Triton 3.6 passes a tuple in it on to other
    functions only by a constant of its own, ``S: tl.constexpr = P.saved``.
    """

    act: Activation
    parts: int
    bias: bool
    """fc1's bias is added as it is read."""
    saved: Format | None
    """Its codes by groups, of ``group_size`` columns; None: plain values, and 0 columns."""
    group_size: int


def pre_constants(
    activation: str, saved: Format | None, group_size: int, bias: torch.Tensor | None = None
) -> Pre:
    """:class:`Pre` of an activation by its name."""
    act = ACTIVATIONS[activation]
    return Pre(act, act.parts, bias is not None, saved, group_size)


@triton.jit
def activate(g, ACT: tl.constexpr, FAST: tl.constexpr):
    """Value and derivative of the function of ACT, an ``Activation``."""
    raw = g
    if ACT.limit < float("inf"):
        g = tl.where(raw > ACT.limit, ACT.limit, raw)
    if ACT.function == "squared_relu":
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
        slope = 2.0 * r
    elif ACT.function == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * exp2(g * g * -0.7213475204444817, FAST) * 0.3989422804014327
    else:  # g * sigmoid(z); "inner" is dz/dg
        if ACT.function == "silu":
            z = g
            inner = 1.0
        elif ACT.function == "quick_gelu":
            z = g * 1.702
            inner = 1.702
        else:
            tl.static_assert(ACT.function == "gelu_tanh")
            z = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
            inner = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        s = sigmoid(z, FAST)
        value = g * s
        slope = s + value * (1.0 - s) * inner
    if ACT.limit < float("inf"):
        slope = tl.where(raw > ACT.limit, 0.0, slope)
    return value, slope


@triton.jit
def linear(up, ACT: tl.constexpr):
    """What the gate's value is multiplied by, and its derivative."""
    slope = 1.0
    if ACT.limit < float("inf"):
        slope = tl.where(tl.abs(up) > ACT.limit, 0.0, 1.0)
        up = tl.clamp(up, -ACT.limit, ACT.limit, propagate_nan=tl.PropagateNan.ALL)
    if ACT.offset != 0.0:
        up += ACT.offset
    return up, slope


@triton.jit
def add_bias(value, bias, part, at, P: tl.constexpr):
    _, column, _, inside, _, columns, _ = at
    if P.bias:  # zero outside, where an amax would see it
        more = tl.load(bias + part * columns + column, mask=column < columns, other=0.0)
        value = tl.where(inside, value + more.to(tl.float32), 0.0)
    return value


@triton.jit
def load_part(x, scales, bias, part, at, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr):
    """A tile of the gate (part 0) or of up (part 1), fp32, from plain values or from per-group
    codes. ``at``: see :func:`~coat_dist.kernels.groups.place`.
    """
    S: tl.constexpr = P.saved
    row, column, group, inside, in_group, columns, groups = at
    out = load_tile(
        x,
        scales,
        row * P.parts + part,
        column,
        group,
        inside,
        in_group,
        columns,
        groups,
        BM,
        BN,
        P.group_size,
        S,
    )
    return add_bias(out, bias, part, at, P)


@triton.jit
def backward(
    grad, x, scales, at, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr
):
    """From ``grad``, the gradient of the activation: the activation, the gradients of gate and up,
    and ``grad`` times the activation. Up is loaded after the gate has been used, which takes fewer
    registers. Without a gate the third result means nothing.
    """
    ACT: tl.constexpr = P.act
    gate = load_part(x, scales, None, 0, at, BM, BN, P)
    value, slope = activate(gate, ACT, FAST)
    d_up = grad * value
    product = d_up
    if P.parts == 2:
        up, up_slope = linear(load_part(x, scales, None, 1, at, BM, BN, P), ACT)
        grad *= up
        value *= up
        product = d_up * up
        d_up *= up_slope
    return value, grad * slope, d_up, product
