"""Cross entropy kernels: the functions of ``reference/cross_entropy.py`` that read logits, once
each.

fp32 but for the sums. The exponential's argument is reduced without fp64: log2(e) is split in two,
of which the first part has 15 bits. Its product with a BF16 logit is exact, and so is the
difference to the exponent. The hardware's 2**f of the remaining fraction has an error of about
2**-22, and is the one thing that differs from the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..reference.cross_entropy import LogitStats
from .approximations import sigmoid
from .launch import cdiv, fast_launch, next_power_of_2

# 16-byte loads of BF16 for each of 256 threads, twice. Not tuned.
BLOCK = 4096

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_HIGH = tl.constexpr(1.44268798828125)  # 23637 / 2**14
LOG2E_LOW = tl.constexpr(1.4426950408889634 - 1.44268798828125)
LOWEST = tl.constexpr(-3.4028234663852886e38)
# From here on every fp32 is a whole number: added and subtracted, it rounds.
INTEGERS = tl.constexpr(2.0**23)
# Added to a small whole number: that number stands in the lowest bits.
SHIFTED = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def split_exp(x):
    """exp(x) = mantissa * 2**n: n and mantissa. What is not finite has the lowest n and any
    mantissa.
    """
    t = x * LOG2E
    size = tl.abs(t)
    n = tl.where(size < INTEGERS, (size + INTEGERS) - INTEGERS, tl.minimum(size, -LOWEST))
    n = tl.where(t < 0, -n, n)
    fraction = tl.fma(x, LOG2E_LOW, tl.fma(x, LOG2E_HIGH, -n))
    mantissa = tl.exp2(tl.minimum(tl.maximum(fraction, -1.0), 1.0))
    return tl.where(tl.abs(x) < float("inf"), n, LOWEST), mantissa


@triton.jit
def pow2_fp32(shift):
    """2**shift for whole numbers up to 127, exactly; 0 below 2**-126."""
    bits = (tl.maximum(shift, -127.0) + SHIFTED).to(tl.int32, bitcast=True)
    return ((bits << 23) + 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def term(x, n, mantissa, exponent):
    """exp(x) / 2**exponent; NaN for NaN and +infinity."""
    value = tl.where(x == float("-inf"), 0.0, mantissa * pow2_fp32(n - exponent))
    return tl.where(x < float("inf"), value, float("nan"))


@triton.jit
def transform(x, scale, softcap, SOFTCAP: tl.constexpr):
    """The logit of a raw product, and its derivative."""
    if SOFTCAP:
        s = sigmoid(x * (2.0 * scale / softcap), False)
        return softcap * (2.0 * s - 1.0), scale * (4.0 * s * (1.0 - s))
    else:
        return x * scale, scale


@fast_launch
@triton.jit
def _stats_kernel(
    logits,
    labels,
    exponents,
    totals,
    found,
    columns,
    stride,
    offset,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    exponent = tl.full((1,), LOWEST, tl.float32)
    total = tl.full((1,), 0.0, tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(source + column, mask=column < columns, other=0.0).to(tl.float32)
        x, _ = transform(x, scale, softcap, SOFTCAP)
        x = tl.where(column < columns, x, float("-inf"))
        n, mantissa = split_exp(x)
        largest = tl.maximum(exponent, tl.max(n, 0))
        terms = term(x, n, mantissa, largest)
        total = total * pow2_fp32(exponent - largest).to(tl.float64) + tl.sum(
            terms.to(tl.float64), 0
        )
        exponent = largest
    here = row + tl.arange(0, 1)
    tl.store(exponents + here, exponent)
    tl.store(totals + here, total)
    local = tl.load(labels + here) - offset
    inside = (local >= 0) & (local < columns)
    x = tl.load(source + local, mask=inside, other=0.0).to(tl.float32)
    x, _ = transform(x, scale, softcap, SOFTCAP)
    tl.store(found + here, x)


def logit_stats(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offset: int,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> LogitStats:
    """See :func:`coat_dist.reference.cross_entropy.logit_stats`."""
    logits = _columns_adjacent(logits)
    rows, columns = logits.shape
    exponent = logits.new_empty(rows, dtype=torch.float32)
    total = logits.new_empty(rows, dtype=torch.float64)
    label = torch.empty_like(exponent)
    if rows:
        _stats_kernel[(rows,)](
            logits,
            labels.contiguous(),
            exponent,
            total,
            label,
            columns,
            logits.stride(0),
            offset,
            scale,
            softcap,
            SOFTCAP=softcap > 0,
            BLOCK=_block(columns),
            num_warps=8,
        )
    return LogitStats(exponent, total, label)


@fast_launch
@triton.jit
def _grad_kernel(
    logits,
    labels,
    exponents,
    inverses,
    boosts,
    dlosses,
    out,
    columns,
    stride,
    out_stride,
    offset,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    BOOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    x, slope = transform(x, scale, softcap, SOFTCAP)
    n, mantissa = split_exp(x)
    value = term(x, n, mantissa, tl.load(exponents + row)) * tl.load(inverses + row)
    if BOOST:
        value = value * tl.load(boosts + row)
    value = tl.where(column == tl.load(labels + row) - offset, value - 1.0, value) * tl.load(
        dlosses + row
    )
    value = value * slope
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def logit_grad(
    logits: torch.Tensor,
    labels: torch.Tensor,
    offset: int,
    exponent: torch.Tensor,
    inverse: torch.Tensor,
    boost: torch.Tensor | None,
    dloss: torch.Tensor,
    out: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See :func:`coat_dist.reference.cross_entropy.logit_grad`."""
    if out is None:
        out = logits.new_empty(logits.shape)
    logits = _columns_adjacent(logits)
    rows, columns = logits.shape
    target = out
    if out.stride(-1) != 1:
        target = logits.new_empty(logits.shape)
    if logits.numel():
        block = _block(columns)
        _grad_kernel[(rows, cdiv(columns, block))](
            logits,
            labels.contiguous(),
            exponent,
            inverse,
            boost,
            dloss.contiguous(),
            target,
            columns,
            logits.stride(0),
            target.stride(0),
            offset,
            scale,
            softcap,
            SOFTCAP=softcap > 0,
            BOOST=boost is not None,
            BLOCK=block,
            num_warps=8,
        )
    return out if target is out else out.copy_(target)


def _columns_adjacent(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _block(columns: int) -> int:
    return min(BLOCK, max(128, next_power_of_2(columns)))
