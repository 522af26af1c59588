"""Formats of moments inside a kernel: the classes of ``reference/moment_formats.py``, part for
part.

The four functions at the end, called as the methods are, choose by ``C.format`` at compile time:
``exponents``, ``spaced``, ``codes`` and ``read``. A new format gets its functions here, a branch
where it differs, and a case in :func:`constants`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.moment_formats import LOG8_SPAN, LOG8_UNIT, FP8Moments
from ..reference.moments import MomentCodec
from . import fp8
from .approximations import exp2, log2
from .fp8 import Format, from_fp8, to_fp8, with_sign

TINY_BITS = tl.constexpr(0x00800000)
# Added: rounds to an integer, ties to even, and leaves it in the low bits.
_ROUND = tl.constexpr(1.5 * 2.0**23)
_LOG8_UNIT = tl.constexpr(LOG8_UNIT)
_LOG8_PER_OCTAVE = tl.constexpr(LOG8_UNIT / LOG8_SPAN)


class Constants(NamedTuple):
    """What the kernel has to know of a codec, as compile-time constants."""

    format: str
    """"fp8", "int8" or "log8"."""
    fp8: Format | None
    """Of FP8 formats; None for others."""
    smallest: float
    """The smallest positive number of FP8 formats; 0 for others."""
    lowest: float
    """The smallest normal number of FP8 formats; 0 for others."""
    max: float
    log2_max: float
    unit: float
    noise: float
    """What noise in (-1/2, 1/2) is multiplied by before it is used: the format's relative step."""
    noise_bits: int
    """Those of ``noise`` as an fp32 number, and the bit of 2**-17 in its fraction."""
    k_numerator: float
    finer: int
    span: float
    expand: bool
    keep_nonzero: bool
    over_root: bool
    keep_grid: bool


def constants(codec: MomentCodec, tensor: torch.Tensor) -> Constants:
    """Those of kernels on the device of ``tensor``."""
    kind = codec.kind
    return _constants(
        codec, fp8.constants(kind.fp8, tensor) if isinstance(kind, FP8Moments) else None
    )


@functools.cache
def _constants(codec: MomentCodec, fmt: Format | None) -> Constants:
    kind = codec.kind
    own = kind.fp8 if isinstance(kind, FP8Moments) else None
    bits = own.mantissa_bits if own else 0
    return Constants(
        format="fp8" if own else kind.name,
        fp8=fmt,
        smallest=own.smallest if own else 0.0,
        lowest=own.smallest * 2.0**bits if own else 0.0,
        max=kind.max,
        log2_max=math.log2(kind.max),
        unit=kind.unit,
        noise=2.0**-bits,
        noise_bits=(127 - bits) << 23 | 1 << 6,
        k_numerator=codec.k_numerator,
        finer=kind.finer,
        span=codec.span,
        expand=codec.expand,
        keep_nonzero=codec.keep_nonzero,
        over_root=codec.over_root,
        keep_grid=codec.keep_grid,
    )


@triton.jit
def _power_read(code, half_log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    size, power = tl.abs(code), (0.5 * C.unit) / k.to(tl.float32)
    # 0 of the largest, to the bit.
    octaves = log2(size, FAST) - log2(tl.full((), C.max, tl.float32), FAST)
    return size, exp2(octaves * power[:, None] + half_log_a[:, None], FAST)


@triton.jit
def _power_spaced(magnitude, log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    power = k * (1.0 / C.unit)
    return exp2(
        log2(magnitude, FAST) * power[:, None] + (C.log2_max - log_a * power)[:, None], FAST
    )


@triton.jit
def _fp8_codes(y, x, bits, noise, C: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    F: tl.constexpr = C.fp8
    # With expansion no y is below 2 / F, which is more than the smallest code.
    if C.keep_nonzero and not C.expand:
        y = tl.where(
            bits < TINY_BITS, y, tl.maximum(y, C.smallest, propagate_nan=tl.PropagateNan.ALL)
        )
    if STOCHASTIC:
        # Noise of one step of the grid makes the rounding to nearest below take either neighbour.
        # Not across the power of two at or below y, where steps are half as large.
        power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        y = tl.maximum(y + noise * tl.maximum(power, C.lowest), power)
    if SIGNED:
        y = with_sign(y, x)
    return to_fp8(y, F).to(tl.uint8, bitcast=True)  # to nearest, ties to even; above F it saturates


@triton.jit
def _int8_codes(y, x, noise, C: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        y = tl.minimum(y, C.max) + noise
    return _low_byte(with_sign(y, x))


@triton.jit
def _log8_read(q, half_log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    code, step = q.to(tl.float32), k.to(tl.float32) * (0.5 / _LOG8_UNIT)
    root = exp2((code - C.max) * step[:, None] + half_log_a[:, None], FAST)
    # Not a choice by q: NaN of a must stay, also where codes are zero.
    return code, root * tl.minimum(code, 1.0)


@triton.jit
def _log8_spaced(magnitude, log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    steps = _LOG8_UNIT / k
    y = log2(magnitude, FAST) * steps[:, None] + (C.max - log_a * steps)[:, None]
    return tl.maximum(y, 0.0)  # zeros from -inf; and NaN, as its group's a is NaN


@triton.jit
def _log8_codes(y, noise, k, C: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
    if STOCHASTIC:  # the probability of the upper code is linear between decoded values
        lower = tl.floor(y)
        step = k * (1.0 / _LOG8_UNIT)
        upper = (exp2((y - lower) * step[:, None], FAST) - 1.0) * (1.0 / (exp2(step, FAST) - 1.0))[
            :, None
        ]
        # The sum's own rounding may reach 255.5.
        y = tl.minimum(lower + tl.minimum(upper, 1.0) + noise, C.max)
    return _low_byte(y)


@triton.jit
def _low_byte(y):
    """|y| < 2**22 rounded to an integer, ties to even: its low eight bits, in two's complement."""
    return (y + _ROUND).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def exponents(spread, C: tl.constexpr):
    """k of each group, fp32, not clamped."""
    if C.format == "log8":
        k = tl.where(spread > 0, tl.ceil(spread * _LOG8_PER_OCTAVE), 1.0)
    else:
        k = tl.where(spread > 0, tl.floor(C.k_numerator / spread), 255.0)
    return k


@triton.jit
def spaced(magnitude, log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    """Positions of magnitudes among the codes, before rounding."""
    if C.format == "log8":
        y = _log8_spaced(magnitude, log_a, k, C, FAST)
    else:
        y = _power_spaced(magnitude, log_a, k, C, FAST)
    return y


@triton.jit
def codes(
    y,
    x,
    bits,
    k,
    noise,
    C: tl.constexpr,
    SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr,
):
    """The bytes that are stored; ``bits`` are those of x's magnitudes."""
    if C.format == "log8":
        q = _log8_codes(y, noise, k, C, STOCHASTIC, FAST)
    elif C.format == "int8":
        q = _int8_codes(y, x, noise, C, STOCHASTIC)
    else:
        q = _fp8_codes(y, x, bits, noise, C, SIGNED, STOCHASTIC)
    return q


@triton.jit
def read(q, half_log_a, k, C: tl.constexpr, FAST: tl.constexpr):
    """Codes as signed numbers, their size (0 where they mean zero), and the square root of their
    magnitude.

    The largest code must give back a, or the amax would rise from step to step: so it is told from
    others by a difference that is exactly zero, whatever k multiplies it with. That is an addition
    more than one fused multiply-add, which AdamW on 10**9 parameters feels: 4.58 and 4.74 ms
    against 4.17 and 4.38 in turns on one H200, whose clock falls under this load. A sum that is
    rounded down instead (FP8 only) gave back a third of that, and other codes.
    """
    if C.format == "log8":
        code, root = _log8_read(q, half_log_a, k, C, FAST)
        size = code
    else:
        if C.format == "int8":
            code = q.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            code = from_fp8(q.to(C.fp8.fp8, bitcast=True))
        size, root = _power_read(code, half_log_a, k, C, FAST)
    return code, size, root
