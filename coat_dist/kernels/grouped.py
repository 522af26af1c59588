"""Kernels of ``reference/grouped.py``. Rows of experts come by blocks: a tile of rows has one expert, and its scale.

Quantizing and backward of the activation are the kernels of a single tensor, told where the block's scale lies.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ActivationGradients
from ..reference.grouped import BLOCK, ExpertRows
from . import activation_backward as act
from .fp8 import atomic_amax, constants, magnitude_bits, pack_rows, scale_of, store_turned
from .launch import cdiv, fast_launch, next_power_of_2
from .quantize import launch_quantize, packet

__all__ = [
    "activation_backward_experts",
    "activation_grad_amax_experts",
    "amax_experts",
    "quantize_columns",
    "quantize_experts",
    "quantize_experts_both",
    "take_rows",
]

# Columns and warps of a tile of BLOCK rows; columns, packets of rows, warps of a tile of a weight; elements of a row.
AMAX_TILE = (512, 8)
COLUMNS_TILE = (64, 32, 8)
TAKE_TILE = 4096


@fast_launch
@triton.jit
def _take_kernel(x, index, out, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.load(index + row).to(tl.int64)
    value = tl.load(x + at * columns + column, mask=(column < columns) & (at >= 0), other=0.0)
    tl.store(out + row * columns + column, value, mask=column < columns)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.take_rows`."""
    x = x.contiguous()
    count, columns = index.shape[0], x.shape[1]
    out = torch.empty(count, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = min(TAKE_TILE, next_power_of_2(columns))
        _take_kernel[(count, cdiv(columns, tile))](x, index, out, columns, TILE=tile, num_warps=4)
    return out


@fast_launch
@triton.jit
def _amax_kernel(x, blocks, out, columns, BM: tl.constexpr, BN: tl.constexpr):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    value = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    atomic_amax(out + tl.load(blocks + tl.program_id(0)), magnitude_bits(value))


def amax_experts(x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.amax_experts`."""
    x = x.contiguous()
    out = torch.zeros(rows.experts, dtype=torch.float32, device=x.device)
    width, warps = AMAX_TILE
    _amax_kernel[(x.shape[0] // BLOCK, cdiv(x.shape[1], width))](
        x, rows.blocks, out, x.shape[1], BM=BLOCK, BN=width, num_warps=warps
    )
    return out


def quantize_experts(x: torch.Tensor, fmt: FP8Format, scales: torch.Tensor, rows: ExpertRows | None) -> QuantizedTensor:
    """See :func:`coat_dist.reference.grouped.quantize_experts`."""
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    x = x.contiguous()
    if rows is not None:
        launch_quantize(x, scales, codes, None, constants(fmt, x), rows.blocks)
    elif x.shape[1] % BLOCK == 0:
        blocks = _blocks_of_matrices(x.shape[0], x.shape[1], x.device)
        launch_quantize(x.view(-1, x.shape[2]), scales, codes.view(-1, x.shape[2]), None, constants(fmt, x), blocks)
    else:
        for matrix, scale, out in zip(x, scales, codes, strict=True):
            launch_quantize(matrix, scale, out, None, constants(fmt, x))
    return QuantizedTensor(codes, scales, "expert")


@functools.lru_cache(maxsize=64)
def _blocks_of_matrices(experts: int, rows: int, device: torch.device) -> torch.Tensor:
    """:attr:`ExpertRows.blocks` of matrices one below the other."""
    with torch.inference_mode(False):
        return torch.arange(experts, dtype=torch.int32, device=device).repeat_interleave(rows // BLOCK)


def quantize_experts_both(
    x: torch.Tensor, fmt: FP8Format, scales: torch.Tensor, rows: ExpertRows
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """See :func:`coat_dist.reference.grouped.quantize_experts_both`."""
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    turned = torch.empty(x.shape[::-1], dtype=fmt.dtype, device=x.device)
    launch_quantize(x, scales, codes, turned, constants(fmt, x), rows.blocks)
    return QuantizedTensor(codes, scales, "expert"), QuantizedTensor(turned, scales, "expert")


@fast_launch
@triton.jit
def _columns_kernel(
    x, out, scales, k, n, C: tl.constexpr, DROP: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Two reads of BN columns: one for their scales, one for the codes. PACK rows make an element of ``out``."""
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
            last, y = y, tl.load(x + at * n + column, mask=inside, other=0.0).to(tl.float32) * factor[None, :]
            packed = pack_rows(packed, last, y, i, PACK, C)
        store_turned(out, packed, first + row, column, height, inside)


def quantize_columns(x: torch.Tensor, fmt: FP8Format) -> QuantizedTensor:
    """See :func:`coat_dist.reference.grouped.quantize_columns`."""
    x = x.contiguous()
    experts, k, n = x.shape
    codes = torch.empty(experts, n, k, dtype=fmt.dtype, device=x.device)
    scales = torch.empty(experts, n, 1, dtype=torch.float32, device=x.device)
    pack, word = packet(k)
    bn, bm, warps = COLUMNS_TILE
    if x.numel():
        _columns_kernel[(cdiv(n, bn), experts)](
            x, codes.view(word), scales, k, n, C=constants(fmt, x), DROP=23, PACK=pack, BM=bm, BN=bn, num_warps=warps
        )  # fmt: skip
    return QuantizedTensor(codes, scales, "row")


def activation_grad_amax_experts(
    da: torch.Tensor, pre8: QuantizedTensor, activation: str, rows: ExpertRows
) -> torch.Tensor:
    """See :func:`coat_dist.reference.grouped.activation_grad_amax_experts`."""
    return act.launch_grad_amax(da, pre8, activation, rows)


def activation_backward_experts(
    da: torch.Tensor,
    pre8: QuantizedTensor,
    activation: str,
    grad_fmt: FP8Format,
    grad_scales: torch.Tensor,
    fmt: FP8Format,
    scales: torch.Tensor,
    rows: ExpertRows,
) -> ActivationGradients:
    """See :func:`coat_dist.reference.grouped.activation_backward_experts`."""
    return act.launch_backward(da, pre8, activation, grad_fmt, grad_scales, fmt, scales, None, rows)
