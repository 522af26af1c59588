"""Decoding and encoding of moments inside a kernel: ``reference/moments.py``, on tiles of [rows,
group_size].

With ``FAST`` the hardware's approximations, on a GPU; without, exact functions, for the
interpreter. Two things come for free: lg2(0) = -inf and ex2(-inf) = 0, so zeros need no branch; and
magnitudes are compared as integers, where NaN > infinity > any number, so reductions cannot lose a
NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference.moments import K_SLACK
from .approximations import log2
from .fp8 import INF_BITS, NAN_BITS, TINY, with_sign
from .moment_formats import TINY_BITS, codes, constants, exponents, read, spaced

__all__ = ["constants", "decode", "dither", "encode", "mix"]

_BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
_HEADROOM = tl.constexpr(1 << 21)
_LOOSE = tl.constexpr(1 << 22)
_SAME = tl.constexpr(64)
_GOLDEN = tl.constexpr(0x4F1BBD)
_K_SLACK = tl.constexpr(K_SLACK)
_ROOT_TINY = tl.constexpr(2.0**-63)


@triton.jit
def mix(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dither(start, phase, C: tl.constexpr, GROUP: tl.constexpr):
    """The noise of rows of GROUP elements, from the random ``start`` of each, less a half and
    times C.noise.
    """
    visited = start + (phase.to(tl.uint32) * (start & 6 | 1) << 20)
    bits = visited[:, None] + tl.arange(0, GROUP).to(tl.uint32)[None, :] * _GOLDEN
    # as the fraction of a number in C.noise * [1, 2); the bit below them makes an odd multiple of
    # half a step
    return ((bits & 0x7FFF80) | C.noise_bits).to(tl.float32, bitcast=True) - 1.5 * C.noise


@triton.jit
def decode(q, a, k, C: tl.constexpr, SIGNED: tl.constexpr, FAST: tl.constexpr):
    """Elements, fp32, and of those that are not SIGNED their roots, 2**-63 at least. SIGNED:
    they may be negative.
    """
    code, size, root = read(q, 0.5 * log2(a.to(tl.float32), FAST), k, C, FAST)
    if SIGNED:
        return with_sign(root * root, code)
    else:
        if C.keep_nonzero:  # at least TINY, unless the code is 0
            root = tl.maximum(root, tl.minimum(size, _ROOT_TINY), propagate_nan=tl.PropagateNan.ALL)
        return root * root, tl.maximum(root, _ROOT_TINY, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode(
    x,
    old_a,
    old_k,
    noise,
    C: tl.constexpr,
    SIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FAST: tl.constexpr,
):
    """Codes, amax and exponents, as they are stored. ``noise`` is that of :func:`dither`, and read
    if STOCHASTIC; what the amax and exponents were is read if C.keep_grid.
    """
    magnitude = tl.abs(x) if SIGNED else x
    if not FAST:  # lg2 takes subnormals for zero by itself
        magnitude = tl.where(magnitude < TINY, 0.0, magnitude)
    bits = magnitude.to(tl.int32, bitcast=True)
    top = tl.max(bits, 1)
    top = tl.where(top < TINY_BITS, 0, top)
    a_bits = tl.minimum((top + (0xFFFF - _SAME)) & -0x10000, _BF16_MAX_BITS)
    if C.keep_grid:
        old_bits = old_a.to(tl.float32).to(tl.int32, bitcast=True)
        higher = (tl.minimum(top, _BF16_MAX_BITS) + (_HEADROOM + 0xFFFF - _SAME)) & -0x10000
        higher = tl.where(top == 0, 0, tl.minimum(higher, _BF16_MAX_BITS))
        a_bits = tl.where((old_bits >= a_bits) & (old_bits <= a_bits + _LOOSE), old_bits, higher)
    a = tl.where(top < INF_BITS, a_bits, NAN_BITS).to(tl.float32, bitcast=True)
    log_a = tl.where(top == 0, 0.0, log2(a, FAST))
    if C.expand:
        # unsigned: zeros and subnormals wrap around to the far end
        bottom = (
            tl.min((bits - TINY_BITS).to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True)
            + TINY_BITS
        )
        spread = tl.where(top == 0, -1.0, log_a - log2(bottom.to(tl.float32, bitcast=True), FAST))
        if C.over_root:
            spread = tl.minimum(spread, C.span)
        k = tl.minimum(tl.maximum(exponents(spread, C), 1.0), 255.0)
        if C.keep_grid:
            old = old_k.to(tl.float32)
            spare = (k - old) * C.finer
            k = tl.where((spare >= 0.0) & (spare <= 1.0 + k * _K_SLACK), old, k)
    else:
        k = tl.full(a.shape, C.unit, tl.float32)
    y = spaced(magnitude, log_a, k, C, FAST)
    return (
        codes(y, x, bits, k, noise, C, SIGNED, STOCHASTIC, FAST),
        a.to(tl.bfloat16),
        k.to(tl.uint8),
    )
