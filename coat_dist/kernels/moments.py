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

from ..reference.moments import LOG8_SPAN, LOG8_UNIT, MomentCodec, lowest_exponent
from .approximations import exp2, log2

__all__ = ["Constants", "constants", "decode", "encode", "mix"]

# A literal below the smallest normal fp32 would turn the kernel to fp64; this one is exactly that number.
TINY = tl.constexpr(2.0**-126)
_TINY_BITS = tl.constexpr(0x00800000)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
_ROUND = tl.constexpr(1.5 * 2.0**23)  # added: rounds to an integer, ties to even, and leaves it in the low bits
_LOG8_UNIT = tl.constexpr(LOG8_UNIT)
_LOG8_PER_OCTAVE = tl.constexpr(LOG8_UNIT / LOG8_SPAN)


@triton.jit
def mix(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def decode(q, a, k, C: tl.constexpr, SIGNED: tl.constexpr, FAST: tl.constexpr):
    if C.log8:
        code = q.to(tl.float32)
        size = code
        root = exp2((code - C.max) * (k.to(tl.float32) * (0.5 / _LOG8_UNIT))[:, None], FAST)
        root = tl.where(q == 0, 0.0, root)
    else:
        code = q.to(tl.int8 if C.int8 else C.fp8, bitcast=True).to(tl.float32)
        size = tl.abs(code)
        root = exp2(log2(size * (1.0 / C.max), FAST) * ((0.5 * C.unit) / k.to(tl.float32))[:, None], FAST)
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
        if C.log8:
            k = tl.where(spread > 0, tl.ceil(spread * _LOG8_PER_OCTAVE), 1.0)
        else:
            k = tl.where(spread > 0, tl.floor(C.k_numerator / spread), 255.0)
        k = tl.minimum(tl.maximum(k, 1.0), 255.0)
    else:
        k = tl.full(a.shape, C.unit, tl.float32)
    if C.log8:
        steps = _LOG8_UNIT / k
        y = log2(magnitude, FAST) * steps[:, None] + (C.max - log_a * steps)[:, None]
        y = tl.maximum(y, 0.0)  # zeros from -inf; and NaN, as its group's a is NaN
        q = _round_log8(y, noise, k, C, STOCHASTIC, FAST)
    else:
        power = k * (1.0 / C.unit)
        y = exp2(log2(magnitude, FAST) * power[:, None] + (C.log2_max - log_a * power)[:, None], FAST)
        if C.int8:
            if STOCHASTIC:
                y = tl.floor(tl.minimum(y, C.max) + noise)
            q = _low_byte(_with_sign(y, x))
        else:
            q = _round_fp8(y, x, bits, noise, C, SIGNED, STOCHASTIC, FAST)
    return q, a.to(tl.bfloat16), k.to(tl.uint8)


@triton.jit
def _round_fp8(y, x, bits, noise, C: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
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
    return y.to(C.fp8).to(tl.uint8, bitcast=True)  # to nearest, ties to even; above F it saturates


@triton.jit
def _round_log8(y, noise, k, C: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
    if STOCHASTIC:  # the probability of the upper code is linear between decoded values
        y = tl.minimum(y, C.max)
        lower = tl.floor(y)
        step = k * (1.0 / _LOG8_UNIT)
        upper = (exp2((y - lower) * step[:, None], FAST) - 1.0) * (1.0 / (exp2(step, FAST) - 1.0))[:, None]
        y = lower + tl.floor(upper + noise)
    return _low_byte(y)


@triton.jit
def _low_byte(y):
    """|y| < 2**22 rounded to an integer, ties to even: its low eight bits, in two's complement."""
    return (y + _ROUND).to(tl.int32, bitcast=True).to(tl.uint8)


class Constants(NamedTuple):
    """What the kernel has to know of a codec, as compile-time constants; four of them are of FP8 formats only."""

    fp8: tl.dtype | None
    smallest: float
    mantissa_bits: int
    lowest_exponent: int
    int8: bool
    log8: bool
    max: float
    log2_max: float
    unit: float
    k_numerator: float
    expand: bool
    keep_nonzero: bool


@functools.cache
def constants(codec: MomentCodec) -> Constants:
    int8, log8 = codec.format == "int8", codec.format == "log8"
    if int8 or log8:
        fp8 = (None, 0.0, 0, 0)
    else:
        one = codec.fp8
        fp8 = (
            tl.float8e4nv if one.name == "e4m3" else tl.float8e5,
            one.smallest,
            one.mantissa_bits,
            lowest_exponent(one),
        )
    return Constants(
        *fp8,
        int8,
        log8,
        codec.max,
        math.log2(codec.max),
        codec.unit,
        0.0 if log8 else codec.k_numerator,
        codec.expand,
        codec.keep_nonzero,
    )
