"""Decoding and encoding of moments inside a kernel: ``reference/moments.py``, on tiles of [rows, group_size].

With ``FAST`` the hardware's approximations, on a GPU; without, exact functions, for the interpreter. Two things come
for free: lg2(0) = -inf and ex2(-inf) = 0, so zeros need no branch; and magnitudes are compared as integers, where
NaN > infinity > any number, so reductions cannot lose a NaN.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from ..reference.moments import MomentCodec, lowest_exponent
from .approximations import exp2, log2

__all__ = ["Constants", "constants", "decode", "encode", "mix"]

# A literal below the smallest normal fp32 would turn the kernel to fp64; this one is exactly that number.
TINY = tl.constexpr(2.0**-126)
_TINY_BITS = tl.constexpr(0x00800000)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
_ROUND = tl.constexpr(1.5 * 2.0**23)  # added and subtracted: rounds to an integer, ties to even


@triton.jit
def mix(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def decode(q, a, k, C: tl.constexpr, SIGNED: tl.constexpr, FAST: tl.constexpr):
    code = q.to(C.fp8, bitcast=True).to(tl.float32)
    size = tl.abs(code)
    root = exp2(log2(size * (1.0 / C.max), FAST) * (8.0 / k.to(tl.float32))[:, None], FAST)
    x = a.to(tl.float32)[:, None] * root * root
    if C.keep_nonzero:  # at least TINY, unless the code is 0
        x = tl.maximum(x, tl.minimum(size, TINY), propagate_nan=tl.PropagateNan.ALL)
    return _with_sign(x, code) if SIGNED else x


@triton.jit
def _with_sign(x, of):
    bits = x.to(tl.int32, bitcast=True) | (of.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(x, noise, C: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
    magnitude = tl.abs(x) if SIGNED else x
    if not FAST:  # lg2 takes subnormals for zero by itself
        magnitude = tl.where(magnitude < TINY, 0.0, magnitude)
    bits = magnitude.to(tl.int32, bitcast=True)
    top = tl.max(bits, 1)
    top = tl.where(top < _TINY_BITS, 0, top)
    a_bits = tl.minimum((top + 0xFFFF) & -0x10000, _BF16_MAX_BITS)
    a = tl.where(top < _INF_BITS, a_bits, _NAN_BITS).to(tl.float32, bitcast=True)
    log_a = tl.where(top == 0, 0.0, log2(a, FAST))
    if C.expand:
        # unsigned: zeros and subnormals wrap around to the far end
        bottom = tl.min((bits - _TINY_BITS).to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True) + _TINY_BITS
        spread = tl.where(top == 0, -1.0, log_a - log2(bottom.to(tl.float32, bitcast=True), FAST))
        k = tl.where(spread > 0, tl.floor(C.k_numerator / spread), 255.0)
        k = tl.minimum(tl.maximum(k, 1.0), 255.0)
    else:
        k = tl.full(a.shape, 16.0, tl.float32)
    power = k * 0.0625
    y = exp2(log2(magnitude, FAST) * power[:, None] + (C.log2_max - log_a * power)[:, None], FAST)
    if C.keep_nonzero and not C.expand:  # with expansion no y is below 2 / F, which is more than the smallest code
        y = tl.where(bits < _TINY_BITS, y, tl.maximum(y, C.smallest, propagate_nan=tl.PropagateNan.ALL))
    if STOCHASTIC or not FAST:  # onto the format's grid; the interpreter's own conversion does not round to nearest
        y = tl.minimum(y, C.max, propagate_nan=tl.PropagateNan.ALL)
        step_exponent = tl.maximum(y.to(tl.int32, bitcast=True) >> 23, C.lowest_exponent) - C.mantissa_bits
        step = (step_exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - step_exponent) << 23).to(tl.float32, bitcast=True)
        on_grid = tl.floor(y * inverse + noise) if STOCHASTIC else (y * inverse + _ROUND) - _ROUND
        y = tl.where(y == y, on_grid * step, y)
    if SIGNED:
        y = _with_sign(y, x)
    q = y.to(C.fp8).to(tl.uint8, bitcast=True)  # to nearest, ties to even; above F it saturates
    return q, a.to(tl.bfloat16), k.to(tl.uint8)


class Constants(NamedTuple):
    """What the kernel has to know of a codec, as compile-time constants."""

    fp8: tl.dtype
    max: float
    smallest: float
    mantissa_bits: int
    lowest_exponent: int
    log2_max: float
    k_numerator: float
    expand: bool
    keep_nonzero: bool


@functools.cache
def constants(codec: MomentCodec) -> Constants:
    fp8 = codec.fp8
    return Constants(
        tl.float8e4nv if fp8.name == "e4m3" else tl.float8e5,
        fp8.max,
        fp8.smallest,
        fp8.mantissa_bits,
        lowest_exponent(fp8),
        math.log2(fp8.max),
        codec.k_numerator,
        codec.expand,
        codec.keep_nonzero,
    )
