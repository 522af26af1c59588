"""One AdamW step with FP8 moments in one pass over memory: the kernel of ``reference/adamw.py``.

A program takes a tile of [ROWS, group_size] elements: decode, update, reduce each row, encode. Per parameter it moves
the fp32 parameter twice, the gradient once and 2.05 bytes of moments twice, so it is bound by memory as long as its
arithmetic stays short. With exact ``log2``, ``exp2``, division and square root it does not (3.55 ms for 2**29
parameters on an H200); with the hardware's approximations, which err by some 2**-22 against the 2**-4 of a code, it
does: 2.07 ms, 98 % of the bandwidth of a copy, where torch's fused fp32 AdamW takes 4.32 ms. That also takes counting
instructions: magnitudes scale in the exponent, by one fused multiply-add, and signs are bits.

Against the definition: ``a`` and ``k`` differ by one step where what they round is within arithmetic error of a step;
where both are equal, codes are equal except for values within about 2**-13 of the middle between two codes, which may
take the neighbour. Parameters agree within 2**-22 of themselves and 4e-5 of the update's terms.

Two things come for free: lg2(0) = -inf and ex2(-inf) = 0, so zeros need no branch; and magnitudes are compared as
integers, where NaN > infinity > any number, so reductions cannot lose a NaN.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.adamw import AdamWStep
from ..reference.moments import Moment, MomentCodec, lowest_exponent

__all__ = ["adamw_step"]

# H200, 2**29 parameters, ms by tile/warps: 1024/4 2.07, 1024/2 2.09, 1024/1 2.34, 512/1 2.07, 512/2 2.10, 512/4 2.41
TILE_ELEMENTS = 1024
NUM_WARPS = 4

# A literal below the smallest normal fp32 would turn the kernel to fp64; this one is exactly that number.
TINY = tl.constexpr(2.0**-126)
_TINY_BITS = tl.constexpr(0x00800000)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_BF16_MAX_BITS = tl.constexpr(0x7F7F0000)
_ROUND = tl.constexpr(1.5 * 2.0**23)  # added and subtracted: rounds to an integer, ties to even


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def _sqrt(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.sqrt(x)


@triton.jit
def _mix(x):
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _decode(q, a, k, C: tl.constexpr, SIGNED: tl.constexpr, FAST: tl.constexpr):
    code = q.to(C.fp8, bitcast=True).to(tl.float32)
    size = tl.abs(code)
    root = _exp2(_log2(size * (1.0 / C.max), FAST) * (8.0 / k.to(tl.float32))[:, None], FAST)
    x = a.to(tl.float32)[:, None] * root * root
    if C.keep_nonzero:  # at least TINY, unless the code is 0
        x = tl.maximum(x, tl.minimum(size, TINY), propagate_nan=tl.PropagateNan.ALL)
    return _with_sign(x, code) if SIGNED else x


@triton.jit
def _with_sign(x, of):
    bits = x.to(tl.int32, bitcast=True) | (of.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, noise, C: tl.constexpr, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
    magnitude = tl.abs(x) if SIGNED else x
    if not FAST:  # lg2 takes subnormals for zero by itself
        magnitude = tl.where(magnitude < TINY, 0.0, magnitude)
    bits = magnitude.to(tl.int32, bitcast=True)
    top = tl.max(bits, 1)
    top = tl.where(top < _TINY_BITS, 0, top)
    a_bits = tl.minimum((top + 0xFFFF) & -0x10000, _BF16_MAX_BITS)
    a = tl.where(top < _INF_BITS, a_bits, _NAN_BITS).to(tl.float32, bitcast=True)
    log_a = tl.where(top == 0, 0.0, _log2(a, FAST))
    if C.expand:
        # unsigned: zeros and subnormals wrap around to the far end
        bottom = tl.min((bits - _TINY_BITS).to(tl.uint32, bitcast=True), 1).to(tl.int32, bitcast=True) + _TINY_BITS
        spread = tl.where(top == 0, -1.0, log_a - _log2(bottom.to(tl.float32, bitcast=True), FAST))
        k = tl.where(spread > 0, tl.floor(C.k_numerator / spread), 255.0)
        k = tl.minimum(tl.maximum(k, 1.0), 255.0)
    else:
        k = tl.full(a.shape, 16.0, tl.float32)
    power = k * 0.0625
    y = _exp2(_log2(magnitude, FAST) * power[:, None] + (C.log2_max - log_a * power)[:, None], FAST)
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


@triton.jit(do_not_specialize=["seed"])
def _adamw_kernel(
    param, grad, m_q, m_a, m_k, v_q, v_a, v_k, n, groups, grad_factor, lr, rate, decay, weight_decay,
    beta1, rest1, beta2, rest2, eps, inverse_bias1, inverse_sqrt_bias2, seed,
    GROUP: tl.constexpr, ROWS: tl.constexpr, LR_IS_TENSOR: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr,
    STOCHASTIC: tl.constexpr, FAST: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    # int64 only for where the tile starts: tensors have more than 2**31 elements, tiles do not
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first = first_row * GROUP
    row = tl.arange(0, ROWS)
    offset = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = row < tl.minimum(groups - first_row, ROWS).to(tl.int32)
    in_tile, inside = in_row[:, None], offset < tl.minimum(n - first, ROWS * GROUP).to(tl.int32)
    param += first
    grad += first
    m_q += first
    v_q += first
    m_a += first_row
    v_a += first_row
    m_k += first_row
    v_k += first_row

    p = tl.load(param + offset, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    m = _decode(
        tl.load(m_q + offset, mask=in_tile, other=0),
        tl.load(m_a + row, mask=in_row, other=0.0),
        tl.load(m_k + row, mask=in_row, other=1),
        M,
        True,
        FAST,
    )
    v = _decode(
        tl.load(v_q + offset, mask=in_tile, other=0),
        tl.load(v_a + row, mask=in_row, other=0.0),
        tl.load(v_k + row, mask=in_row, other=1),
        V,
        False,
        FAST,
    )
    if LR_IS_TENSOR:
        lr = tl.load(lr).to(tl.float32)
        rate = lr * inverse_bias1
        decay = 1.0 - lr * weight_decay
    if SCALED:
        g = g * tl.load(grad_factor)
    if MAXIMIZE:
        g = -g
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    p = p * decay - rate * (m * _reciprocal(_sqrt(v, FAST) * inverse_sqrt_bias2 + eps, FAST))
    tl.store(param + offset, p.to(param.dtype.element_ty), mask=inside)

    noise_m = 0.0
    noise_v = 0.0
    if STOCHASTIC:  # a tile never straddles a multiple of 2**32: its size is a power of two
        key = _mix((first >> 32).to(tl.uint32) ^ seed.to(tl.uint32))
        random = _mix((first.to(tl.uint32) + offset.to(tl.uint32)) ^ key)
        noise_m = (random >> 16).to(tl.float32) * 0.0000152587890625
        noise_v = (random & 0xFFFF).to(tl.float32) * 0.0000152587890625
    q, a, k = _encode(m, noise_m, M, True, STOCHASTIC, FAST)
    tl.store(m_q + offset, q, mask=in_tile)
    tl.store(m_a + row, a, mask=in_row)
    tl.store(m_k + row, k, mask=in_row)
    q, a, k = _encode(v, noise_v, V, False, STOCHASTIC, FAST)
    tl.store(v_q + offset, q, mask=in_tile)
    tl.store(v_a + row, a, mask=in_row)
    tl.store(v_k + row, k, mask=in_row)


class _Constants(NamedTuple):
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
def _constants(codec: MomentCodec) -> _Constants:
    fp8 = codec.fp8
    return _Constants(
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


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: Moment,
    v: Moment,
    codec_m: MomentCodec,
    codec_v: MomentCodec,
    numbers: AdamWStep,
    seed: int | None = None,
) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_step`."""
    n, groups = param.numel(), codec_m.groups(param.numel())
    if n == 0:
        return
    lr, lr_is_tensor = numbers.lr, isinstance(numbers.lr, torch.Tensor)
    rate, decay = (0.0, 0.0) if lr_is_tensor else (lr * numbers.inverse_bias1, 1.0 - lr * numbers.weight_decay)
    rows = TILE_ELEMENTS // codec_m.group_size
    with torch.cuda.device_of(param):
        _adamw_kernel[(triton.cdiv(groups, rows),)](
            param,
            grad,
            *m,
            *v,
            n,
            groups,
            grad if numbers.grad_factor is None else numbers.grad_factor,
            lr,
            rate,
            decay,
            numbers.weight_decay,
            numbers.beta1,
            1.0 - numbers.beta1,
            numbers.beta2,
            1.0 - numbers.beta2,
            numbers.eps,
            numbers.inverse_bias1,
            numbers.inverse_sqrt_bias2,
            0 if seed is None else seed - ((seed >> 31) << 32),  # as int32, so that all seeds share one compiled kernel
            GROUP=codec_m.group_size,
            ROWS=rows,
            LR_IS_TENSOR=lr_is_tensor,
            SCALED=numbers.grad_factor is not None,
            MAXIMIZE=numbers.maximize,
            STOCHASTIC=seed is not None,
            FAST=param.is_cuda,
            M=_constants(codec_m),
            V=_constants(codec_v),
            num_warps=NUM_WARPS,
        )
