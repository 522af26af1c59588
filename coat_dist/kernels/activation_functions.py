"""Device functions that the activation kernels of forward and backward share: the activations with
their derivatives, and the parts of a pre-activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .approximations import exp2, sigmoid
from .groups import load_tile

__all__ = ["activate", "add_bias", "load_part"]


@triton.jit
def activate(g, ACT: tl.constexpr, FAST: tl.constexpr):
    """Value and derivative of the function called ACT."""
    if ACT == "squared_relu":
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
        slope = 2.0 * r
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * exp2(g * g * -0.7213475204444817, FAST) * 0.3989422804014327
    else:  # g * sigmoid(z); "inner" is dz/dg
        if ACT == "silu":
            z = g
            inner = 1.0
        elif ACT == "quick_gelu":
            z = g * 1.702
            inner = 1.702
        else:
            tl.static_assert(ACT == "gelu_tanh")
            z = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
            inner = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        s = sigmoid(z, FAST)
        value = g * s
        slope = s + value * (1.0 - s) * inner
    return value, slope


@triton.jit
def add_bias(value, bias, part, column, inside, columns, BIAS: tl.constexpr):
    if BIAS:  # zero outside, where an amax would see it
        more = tl.load(bias + part * columns + column, mask=column < columns, other=0.0)
        value = tl.where(inside, value + more.to(tl.float32), 0.0)
    return value


@triton.jit
def load_part(
    x,
    scales,
    bias,
    part,
    row,
    column,
    group,
    inside,
    in_group,
    columns,
    groups,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    """A tile of the gate (part 0) or of up (part 1), fp32, from plain values (G = 0) or from
    per-group codes.
    """
    at = row * PARTS + part
    out = load_tile(x, scales, at, column, group, inside, in_group, columns, groups, BM, BN, G, S)
    return add_bias(out, bias, part, column, inside, columns, BIAS)
