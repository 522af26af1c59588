"""Kernels of ``reference/routing.py``.

Choices are sorted by counting: one kernel counts the choices of each expert in each tile, another
adds up the counts and places them. Torch's sort and some forty operations behind it would cost more
on the host than on the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor, format_of
from ..reference.grouped import BLOCK, ExpertRows
from .fp8 import TINY, constants, from_fp8, inverse, pack_rows, store_turned
from .launch import cdiv, fast_launch, next_power_of_2
from .quantize import packet

__all__ = ["quantize_experts_transposed", "route", "take_codes", "take_codes_transposed"]

ROUTE_TILE = 1024  # choices of a program
ROUTE_ELEMENTS = 8192  # choices of a step times experts
TAKE_TILE = 1024  # words of a row
TURNED_TILE = (128, 128, 8)  # rows, columns, warps
RESCALED_TILE = (32, 256, 8)


@triton.jit
def _experts_of(index, at, choices, experts):
    """The expert of each choice ``at``; ``experts`` where there is none."""
    expert = tl.load(index + at, mask=at < choices, other=-1)
    valid = (at < choices) & (expert >= 0) & (expert < experts)
    return tl.where(valid, expert, experts).to(tl.int32)


@fast_launch
@triton.jit
def _count_kernel(
    index, counts, source, choices, total, experts, E: tl.constexpr, TILE: tl.constexpr
):
    """Each expert's choices in a tile; rows are of zeros until choices are placed there."""
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    key = _experts_of(index, at, choices, experts)
    found = tl.histogram(key, E, key < experts)
    if tile * TILE < choices:
        tl.store(counts + tile * E + tl.arange(0, E), found)
    tl.store(source + at, tl.full((TILE,), -1, tl.int32), mask=at < total)


@fast_launch
@triton.jit
def _place_kernel(
    index,
    counts,
    source,
    place,
    blocks,
    ends,
    choices,
    total,
    experts,
    E: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program adds up the counts of all tiles, and places the choices of one of them."""
    tile, tiles = tl.program_id(0), tl.cdiv(choices, TILE)
    expert = tl.arange(0, E)[None, :]
    step = tl.arange(0, STEP)
    before = tl.zeros((1, E), tl.int32)
    filled = tl.zeros((1, E), tl.int32)
    for first in range(0, tiles, STEP):
        other = (first + step)[:, None]
        found = tl.load(counts + other * E + expert, mask=other < tiles, other=0)
        filled += tl.sum(found, 0, keep_dims=True)
        before += tl.sum(tl.where(other < tile, found, 0), 0, keep_dims=True)
    filled = tl.where(expert < experts, (filled + BLOCK - 1) // BLOCK * BLOCK, 0)
    end = tl.cumsum(filled, 1)
    following = end - filled + before  # the row of the next choice of each expert
    end = tl.where(expert == experts - 1, total, end)
    tl.store(ends + expert, end, mask=(expert < experts) & (tile == 0))
    for first in range(tile * TILE, tl.minimum((tile + 1) * TILE, choices), STEP):
        at = first + step
        key = _experts_of(index, at, choices, experts)
        mine = (key[:, None] == expert).to(tl.int32)
        earlier = tl.cumsum(mine, 0) - mine
        slot = tl.sum(mine * (following + earlier), 1)
        following += tl.sum(mine, 0, keep_dims=True)
        tl.store(place + at, tl.where(key < experts, slot, -1), mask=at < choices)
        tl.store(source + slot, at, mask=key < experts)
    for first in range(tile * STEP, total // BLOCK, tl.num_programs(0) * STEP):
        block = first + step
        passed = (end <= block[:, None] * BLOCK) & (expert < experts)
        tl.store(blocks + block, tl.sum(passed.to(tl.int32), 1), mask=block < total // BLOCK)


def route(index: torch.Tensor, experts: int) -> ExpertRows:
    """See :func:`coat_dist.reference.routing.route`; the host waits for nothing, and there are as
    many rows as any choices could need.
    """
    index, choices, width = index.contiguous(), index.numel(), max(next_power_of_2(experts), 2)
    total = max((choices + (BLOCK - 1) * experts) // BLOCK * BLOCK, BLOCK)
    tiles = cdiv(choices, ROUTE_TILE)
    sizes = total, choices, total // BLOCK, experts, tiles * width
    new = torch.empty(sum(sizes), dtype=torch.int32, device=index.device)
    source, place, blocks, ends, counts = new.split(sizes)
    _count_kernel[(cdiv(max(total, choices), ROUTE_TILE),)](
        index,
        counts,
        source,
        choices,
        total,
        experts,
        E=width,
        TILE=ROUTE_TILE,
        num_warps=4,
    )
    _place_kernel[(max(tiles, 1),)](
        index,
        counts,
        source,
        place,
        blocks,
        ends,
        choices,
        total,
        experts,
        E=width,
        TILE=ROUTE_TILE,
        STEP=min(max(ROUTE_ELEMENTS // width, 16), ROUTE_TILE),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return ExpertRows(source, place, blocks, ends, None)


@fast_launch
@triton.jit
def _take_kernel(codes, scales, source, out, out_scales, choices, columns, TILE: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    choice = tl.load(source + slot)
    token = (choice // choices).to(tl.int64)
    value = tl.load(
        codes + token * columns + column, mask=(column < columns) & (choice >= 0), other=0
    )
    tl.store(out + slot * columns + column, value, mask=column < columns)
    if out_scales is not None:
        first = tl.program_id(1) == 0
        scale = tl.load(scales + token, mask=first & (choice >= 0), other=TINY)
        tl.store(out_scales + slot, scale, mask=first)


def take_codes(q: QuantizedTensor, rows: ExpertRows, choices: int = 1) -> QuantizedTensor:
    """See :func:`coat_dist.reference.routing.take_codes`."""
    (_, width), total, device = q.codes.shape, rows.source.shape[0], q.codes.device
    out = torch.empty(total, width, dtype=q.codes.dtype, device=device)
    by_row = q.layout == "row"
    scales = torch.empty(total, 1, dtype=torch.float32, device=device) if by_row else None
    word = torch.int32 if width % 4 == 0 else torch.uint8
    columns = width * q.codes.itemsize // word.itemsize
    tile = min(TAKE_TILE, next_power_of_2(columns))
    _take_kernel[(total, cdiv(columns, tile))](
        q.codes.view(word),
        q.scales if by_row else None,
        rows.source,
        out.view(word),
        scales,
        choices,
        columns,
        TILE=tile,
        num_warps=4,
    )
    return QuantizedTensor(out, q.scales if scales is None else scales, q.layout)


@fast_launch
@triton.jit
def _take_turned_kernel(
    codes,
    row_scales,
    scale,
    blocks,
    source,
    turned,
    choices,
    rows,
    columns,
    C: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With ``scale``, of experts: codes are rounded to it. PACK rows make an element."""
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    packed = tl.zeros((BM, BN), tl.int32)
    y = tl.zeros((BM, BN), tl.float32)
    if scale is not None:
        factor = inverse(scale + tl.load(blocks + tl.program_id(0) * BM * PACK // BLOCK))
    for i in tl.static_range(PACK):
        row = packet.to(tl.int64) * PACK + i
        choice = tl.load(source + row, mask=row < rows, other=-1)
        token = (choice // choices).to(tl.int64)
        inside = (choice >= 0) & (column < columns)
        value = tl.load(codes + token * columns + column, mask=inside, other=0.0)
        if scale is not None:
            times = tl.load(row_scales + token, mask=choice >= 0, other=0.0) * factor
            last, y = y, from_fp8(value) * times
            packed = pack_rows(packed, last, y, i, PACK, C)
        else:
            packed |= value.to(tl.int32) << (8 * i)
    inside = (packet < rows // PACK) & (column < columns)
    store_turned(turned, packed, packet, column, rows // PACK, inside)


def take_codes_transposed(
    q: QuantizedTensor, rows: ExpertRows, choices: int, scales: torch.Tensor | None = None
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.routing.take_codes_transposed`."""
    (_, columns), total = q.codes.shape, rows.source.shape[0]
    turned = torch.empty(columns, total, dtype=q.codes.dtype, device=q.codes.device)
    pack, word = packet(total)
    bm, bn, warps = TURNED_TILE if scales is None else RESCALED_TILE
    codes = q.codes.view(torch.uint8) if scales is None else q.codes
    _take_turned_kernel[(cdiv(total, bm), cdiv(columns, bn))](
        codes,
        None if scales is None else q.scales,
        scales,
        None if scales is None else rows.blocks,
        rows.source,
        turned.view(word),
        choices,
        total,
        columns,
        C=constants(format_of(q.codes.dtype), q.codes),
        PACK=pack,
        BM=bm // pack,
        BN=bn,
        BLOCK=BLOCK,
        num_warps=warps,
    )
    if scales is None:
        return QuantizedTensor(turned, q.scales, "tensor")
    return QuantizedTensor(turned, scales, "expert")


@fast_launch
@triton.jit
def _turn_kernel(
    x, scale, out, k, n, C: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    expert = tl.program_id(2).to(tl.int64)
    x += expert * k * n
    out += expert * n * (k // PACK)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    factor = inverse(scale + expert)
    packed = tl.zeros((BM, BN), tl.int32)
    y = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(PACK):
        row = packet.to(tl.int64) * PACK + i
        inside = (row < k) & (column < n)
        last, y = y, tl.load(x + row * n + column, mask=inside, other=0.0).to(tl.float32) * factor
        packed = pack_rows(packed, last, y, i, PACK, C)
    inside = (packet < k // PACK) & (column < n)
    store_turned(out, packed, packet, column, k // PACK, inside)


def quantize_experts_transposed(
    x: torch.Tensor, fmt: FP8Format, scales: torch.Tensor
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.routing.quantize_experts_transposed`."""
    x = x.contiguous()
    experts, k, n = x.shape
    codes = torch.empty(experts, n, k, dtype=fmt.dtype, device=x.device)
    pack, word = packet(k)
    bm, bn, warps = TURNED_TILE
    if x.numel():
        _turn_kernel[(cdiv(k, bm), cdiv(n, bn), experts)](
            x,
            scales,
            codes.view(word),
            k,
            n,
            C=constants(fmt, x),
            PACK=pack,
            BM=bm // pack,
            BN=bn,
            num_warps=warps,
        )
    return QuantizedTensor(codes, scales, "expert")
