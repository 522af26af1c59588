"""Kernels of ``reference/grouped.py``. Rows of experts come by blocks: a tile of rows has one
expert, and its scale.

Quantizing, and backward of the activation in ``activation_backward.py``, are the kernels of a
single tensor, told where the block's scale lies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.grouped import BLOCK, ExpertRows
from .fp8 import (
    TINY,
    constants,
    dense,
    magnitude_bits,
    pack_rows,
    scale_of,
    store_turned,
)
from .groups import load_tile, place_from, unpack
from .launch import cdiv, fast_launch, next_power_of_2
from .quantize import launch_quantize, packet

# Columns and warps of a tile of BLOCK rows; columns, packets of rows, warps of a tile of a weight;
# elements of a row.
COLUMNS_TILE = (64, 32, 8)
TAKE_TILE = 4096
SUM_TILE = 1024
SCALE_TILE = (2, 2048, 8)
SCALES_TILE = 1024


@fast_launch
@triton.jit
def _take_kernel(x, index, factor, scales, out, out_scales, choices, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at, there = row, row >= 0
    if index is not None:
        choice = tl.load(index + row)
        at, there = (choice // choices).to(tl.int64), choice >= 0
    value = tl.load(x + at * columns + column, mask=(column < columns) & there, other=0)
    if factor is not None:
        value = (value.to(tl.float32) * tl.load(factor + row).to(tl.float32)).to(
            out.dtype.element_ty
        )
    tl.store(out + row * columns + column, value, mask=column < columns)
    if scales is not None:
        first = tl.program_id(1) == 0
        scale = tl.load(scales + at, mask=first & there, other=TINY)
        tl.store(out_scales + row, scale, mask=first)


def launch_take(
    x: torch.Tensor,
    index: torch.Tensor | None,
    out: torch.Tensor,
    most: int,
    factor: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    out_scales: torch.Tensor | None = None,
    choices: int = 1,
) -> None:
    """Rows ``index // choices`` of x, at most ``most`` elements a program; ``scales`` go with
    them, and a row of zeros has the smallest.
    """
    rows, columns = out.shape
    if out.numel():
        tile = min(most, next_power_of_2(columns))
        _take_kernel[(rows, cdiv(columns, tile))](
            x, index, factor, scales, out, out_scales, choices, columns, TILE=tile, num_warps=4
        )


def take_rows(
    x: torch.Tensor, index: torch.Tensor | None = None, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.take_rows`."""
    out = x.new_empty(x.shape[0] if index is None else index.shape[0], x.shape[1])
    launch_take(x.contiguous(), index, out, TAKE_TILE, dense(factor))
    return out


@fast_launch
@triton.jit
def _sum_kernel(x, index, factor, out, columns, K: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    total = tl.zeros((TILE,), tl.float32)
    for i in tl.static_range(K):
        at = tl.load(index + row * K + i).to(tl.int64)
        value = tl.load(x + at * columns + column, mask=inside & (at >= 0), other=0.0)
        value = value.to(tl.float32)
        if factor is not None:
            value *= tl.load(factor + row * K + i).to(tl.float32)
        total += value
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(
    x: torch.Tensor, index: torch.Tensor, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.sum_rows`."""
    x = x.contiguous()
    (count, terms), columns = index.shape, x.shape[1]
    out = x.new_empty(count, columns)
    if out.numel():
        tile = min(SUM_TILE, next_power_of_2(columns))
        _sum_kernel[(count, cdiv(columns, tile))](
            x, index, dense(factor), out, columns, K=terms, TILE=tile, num_warps=4
        )
    return out


@fast_launch
@triton.jit
def _scale_backward_kernel(
    dout,
    factor,
    codes,
    scales,
    d,
    dfactor,
    rows,
    columns,
    groups,
    G: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """BM rows whole."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    times = tl.load(factor + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    at = row[:, None]
    for first in range(0, columns, BN):
        _, column, group, inside, in_group, _, _ = place_from(
            at, first, first // G, rows, columns, groups, BN, BN // G
        )
        grad = tl.load(dout + at * columns + column, mask=inside, other=0.0).to(tl.float32)
        if dfactor is not None:
            y = load_tile(
                codes, scales, at, column, group, inside, in_group, columns, groups, BM, BN, G, S
            )
            sums += grad * y
        tl.store(d + at * columns + column, (grad * times).to(d.dtype.element_ty), mask=inside)
    if dfactor is not None:
        tl.store(dfactor + row, tl.sum(sums, 1).to(dfactor.dtype.element_ty), mask=row < rows)


def scale_rows_backward(
    dout: torch.Tensor, factor: torch.Tensor, y8: QuantizedTensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`coat_dist.reference.grouped.scale_rows_backward`: one pass."""
    dout, (rows, columns) = dout.contiguous(), dout.shape
    d = torch.empty_like(dout)
    dfactor, codes, scales, size, form = None, None, None, 1, None
    if y8 is not None:
        dfactor = factor.new_empty(factor.shape)
        codes, scales, size, form = unpack(y8)
    height, width, warps = SCALE_TILE
    if d.numel():
        _scale_backward_kernel[(cdiv(rows, height),)](
            dout,
            dense(factor),
            codes,
            scales,
            d,
            dfactor,
            rows,
            columns,
            cdiv(columns, size),
            G=size,
            S=form,
            BM=height,
            BN=max(min(width, next_power_of_2(columns)), size),
            num_warps=warps,
        )
    return d, dfactor


@fast_launch
@triton.jit
def _largest_kernel(scales, source, ends, factor, out, least, TILE: tl.constexpr):
    """The rows of one expert. Magnitudes are compared as integers, among which NaN is largest."""
    expert = tl.program_id(0)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    top = magnitude_bits(tl.zeros((TILE,), tl.float32) + least)
    for start in range(first, end, TILE):
        row = start + tl.arange(0, TILE)
        value = tl.load(scales + row, mask=row < end, other=0.0)
        if factor is not None:
            choice = tl.load(source + row, mask=row < end, other=-1)
            value *= tl.load(factor + choice, mask=choice >= 0, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(value))
    tl.store(out + expert, tl.max(top, 0).to(tl.float32, bitcast=True))


def largest_rows(
    scales: torch.Tensor, rows: ExpertRows, least: float, factor: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.largest_rows`."""
    out = scales.new_empty(rows.experts)
    _largest_kernel[(rows.experts,)](
        scales, rows.source, rows.ends, dense(factor), out, least, TILE=SCALES_TILE, num_warps=4
    )
    return out


@fast_launch
@triton.jit
def _spread_kernel(
    a,
    b,
    blocks,
    out,
    of_a,
    total,
    height,
    width,
    a_stride,
    b_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if blocks is not None:
        expert = tl.load(blocks + at // BLOCK, mask=at < of_a, other=0)
    else:
        expert = at // height
    first = tl.load(a + expert * a_stride, mask=at < of_a, other=0.0)
    second = tl.load(
        b + (at - of_a) // width * b_stride, mask=(at >= of_a) & (at < total), other=0.0
    )
    tl.store(out + at, tl.where(at < of_a, first, second), mask=at < total)


def spread_scales(
    a: torch.Tensor, b: torch.Tensor, height: int, width: int, rows: ExpertRows | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of experts, fp32 ``[experts]``, for torch's grouped products: those of ``a`` for each
    of ``rows``, or ``height`` times each, and those of ``b`` ``width`` times each.
    """
    experts = a.shape[0]
    of_a = experts * height if rows is None else rows.source.shape[0]
    total = of_a + experts * width
    out = a.new_empty(total)
    _spread_kernel[(cdiv(total, SCALES_TILE),)](
        a,
        b,
        None if rows is None else rows.blocks,
        out,
        of_a,
        total,
        height,
        width,
        a.stride(0),
        b.stride(0),
        TILE=SCALES_TILE,
        BLOCK=BLOCK,
        num_warps=4,
    )
    first, second = out.split((of_a, total - of_a))
    return first, second


def quantize_experts(
    x: torch.Tensor | QuantizedTensor,
    fmt: FP8Format,
    scales: torch.Tensor,
    transpose: bool = False,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.grouped.quantize_experts`."""
    row_scales = None
    if isinstance(x, QuantizedTensor):
        row_scales, x = x.scales, x.codes
    shape = x.transpose(1, 2).shape if transpose else x.shape
    codes = x.new_empty(shape, dtype=fmt.dtype)
    rows, turned = (None, codes) if transpose else (codes, None)
    form = constants(fmt, x)
    launch_quantize(x.contiguous(), scales, rows, turned, form, row_scales=row_scales)
    return QuantizedTensor(codes, scales, "expert")


@fast_launch
@triton.jit
def _columns_kernel(
    x,
    out,
    scales,
    k,
    n,
    C: tl.constexpr,
    DROP: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Two reads of BN columns: one for their scales, one for the codes. PACK rows make an
    element of ``out``.
    """
    expert = tl.program_id(1).to(tl.int64)
    column = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    height = k // PACK
    x += expert * k * n
    out += expert * n * height
    row = tl.arange(0, BM)[:, None]
    top = tl.zeros((BM, BN), tl.int32)
    for first in range(0, k, BM):
        at = (first + row).to(tl.int64)
        value = tl.load(x + at * n + column, mask=(at < k) & (column < n), other=0.0)
        top = tl.maximum(top, magnitude_bits(value.to(tl.float32)))
    scale, factor = scale_of(tl.max(top, 0), DROP, C)
    flat = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(scales + expert * n + flat, scale, mask=flat < n)
    for first in range(0, height, BM):
        packed = tl.zeros((BM, BN), tl.int32)
        y = tl.zeros((BM, BN), tl.float32)
        inside = (first + row < height) & (column < n)
        for i in tl.static_range(PACK):
            at = (first + row).to(tl.int64) * PACK + i
            last, y = (
                y,
                tl.load(x + at * n + column, mask=inside, other=0.0).to(tl.float32)
                * factor[None, :],
            )
            packed = pack_rows(packed, last, y, i, PACK, C)
        store_turned(out, packed, first + row, column, height, inside)


def quantize_columns(x: torch.Tensor, fmt: FP8Format) -> QuantizedTensor:
    """See :func:`coat_dist.reference.grouped.quantize_columns`."""
    x = x.contiguous()
    experts, k, n = x.shape
    codes = x.new_empty(experts, n, k, dtype=fmt.dtype)
    scales = x.new_empty(experts, n, 1, dtype=torch.float32)
    pack, word = packet(k)
    bn, bm, warps = COLUMNS_TILE
    if x.numel():
        _columns_kernel[(cdiv(n, bn), experts)](
            x,
            codes.view(word),
            scales,
            k,
            n,
            C=constants(fmt, x),
            DROP=23,
            PACK=pack,
            BM=bm,
            BN=bn,
            num_warps=warps,
        )
    return QuantizedTensor(codes, scales, "row")
