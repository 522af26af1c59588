"""Quantization kernels: the functions of ``reference/quantize.py`` that touch whole tensors, with the same codes.

One read of the input and one write of the codes each. Tiles are 2-D so that a transposed result is written along its
own rows: 128 × 128 bytes of codes, the shape at which both sides are whole cache lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference import quantize as reference
from .fp8 import Format, amax_buffer, atomic_amax, constants, group_decode, group_encode, read_amax, to_fp8

__all__ = ["amax", "dequantize", "launch_rows", "quantize_groups", "quantize_tensor", "transpose"]

TILE_M, TILE_N = 128, 128
AMAX_TILE = 16384


@triton.jit
def _amax_kernel(x, out, n, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    offset = tl.arange(0, TILE)
    value = tl.load(x + first + offset, mask=offset < n - first, other=0.0).to(tl.float32)
    atomic_amax(out, value)


def amax(x: torch.Tensor) -> torch.Tensor:
    """See :func:`coat_dist.reference.quantize.amax` (over everything)."""
    x = x.contiguous()
    out = amax_buffer(x.device)
    if x.numel():
        with torch.cuda.device_of(x):
            _amax_kernel[(triton.cdiv(x.numel(), AMAX_TILE),)](x, out, x.numel(), TILE=AMAX_TILE, num_warps=8)
    return read_amax(out)


@triton.jit
def _quantize_kernel(
    x, scale, out, rows, columns, C: tl.constexpr, COPY: tl.constexpr, TRANSPOSE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    if not COPY:
        inverse = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), tl.load(scale) + tl.zeros((1, 1), tl.float32))
        value = to_fp8(value.to(tl.float32) * inverse, C)
    if TRANSPOSE:
        tl.store(out + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(inside))
    else:
        tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], value, mask=inside)


def launch_rows(x: torch.Tensor) -> torch.Tensor:
    """x seen as contiguous rows ``[rows, n]``."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def quantize_tensor(x: torch.Tensor, fmt: FP8Format, scale: torch.Tensor, transpose: bool = False) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.quantize_tensor`."""
    flat = launch_rows(x)
    rows, columns = flat.shape
    codes = torch.empty((columns, rows) if transpose else x.shape, dtype=fmt.dtype, device=x.device)
    _launch(flat, scale, codes, transpose, constants(fmt, x), copy=False)
    return QuantizedTensor(codes, scale, "tensor")


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.transpose`."""
    rows, columns = q.codes.shape
    codes = torch.empty(columns, rows, dtype=q.codes.dtype, device=q.codes.device)
    # As bytes: nothing is converted, and the format does not matter.
    _launch(q.codes.contiguous().view(torch.uint8), q.scales, codes.view(torch.uint8), True, None, copy=True)
    return QuantizedTensor(codes, q.scales, q.layout)


def _launch(
    x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, transpose: bool, c: Format | None, copy: bool
) -> None:
    rows, columns = x.shape
    if not x.numel():
        return
    grid = (triton.cdiv(rows, TILE_M), triton.cdiv(columns, TILE_N))
    with torch.cuda.device_of(x):
        _quantize_kernel[grid](
            x, scale, out, rows, columns, C=c, COPY=copy, TRANSPOSE=transpose, BM=TILE_M, BN=TILE_N, num_warps=8
        )  # fmt: skip


@triton.jit
def _groups_kernel(
    x, codes, scales, rows, columns, groups, C: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    q, stored = group_encode(value, BM, BN, G, E8M0, C)
    tl.store(codes + row * columns + column, q, mask=inside)
    tl.store(scales + row * groups + group, stored, mask=(row < rows) & (group < groups))


def quantize_groups(x: torch.Tensor, fmt: FP8Format, group_size: int, scale: str) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.quantize_groups`."""
    flat = launch_rows(x)
    rows, columns = flat.shape
    groups = triton.cdiv(columns, group_size)
    e8m0 = scale == "e8m0"
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], groups), dtype=torch.uint8 if e8m0 else torch.bfloat16, device=x.device)
    if x.numel():
        grid = (triton.cdiv(rows, 16), triton.cdiv(columns, 256))
        with torch.cuda.device_of(x):
            _groups_kernel[grid](
                flat, codes, scales, rows, columns, groups, C=constants(fmt, x), G=group_size, E8M0=e8m0,
                BM=16, BN=256, num_warps=4,
            )  # fmt: skip
    return QuantizedTensor(codes, scales, "group", group_size)


@triton.jit
def _dequantize_groups_kernel(
    codes, scales, out, rows, columns, groups, G: tl.constexpr, E8M0: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    q = tl.load(codes + row * columns + column, mask=inside, other=0.0)
    stored = tl.load(scales + row * groups + group, mask=(row < rows) & (group < groups), other=0)
    tl.store(
        out + row * columns + column, group_decode(q, stored, BM, BN, G, E8M0).to(out.dtype.element_ty), mask=inside
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See :func:`coat_dist.reference.quantize.dequantize`; the kernel is for groups, other layouts are one product."""
    if q.layout != "group":
        return reference.dequantize(q, dtype)
    codes, scales = launch_rows(q.codes), launch_rows(q.scales)
    rows, columns = codes.shape
    out = torch.empty(q.codes.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        with torch.cuda.device_of(codes):
            _dequantize_groups_kernel[(triton.cdiv(rows, 16), triton.cdiv(columns, 256))](
                codes, scales, out, rows, columns, scales.shape[1], G=q.group_size, E8M0=scales.dtype == torch.uint8,
                BM=16, BN=256, num_warps=4,
            )  # fmt: skip
    return out
