"""Kernels of ``reference/routing.py``.

Choices are sorted by torch, keys of one or two bytes; two kernels make everything else of it, where
some forty operations of torch would cost more on the host than on the GPU.
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

SLOTS = 1024  # rows that a program of the second kernel places
TAKE_TILE = 1024  # words of a row
TURNED_TILE = (128, 128, 8)  # rows, columns, warps
RESCALED_TILE = (32, 256, 8)


@fast_launch
@triton.jit
def _ends_kernel(
    keys,
    first,
    begin,
    ends,
    choices,
    total,
    experts,
    STEPS: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each expert: its first sorted choice, its first row, the row behind its last one."""
    expert = tl.arange(0, E)
    low = tl.zeros((E,), tl.int32)
    high = tl.zeros((E,), tl.int32) + choices
    after, top = low, high
    for _ in range(STEPS):  # the first key that is not below the expert; and not above
        middle = (low + high) // 2
        key = tl.load(keys + middle, mask=middle < high, other=0).to(tl.int32)
        below = (middle < high) & (key < expert)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
        middle = (after + top) // 2
        key = tl.load(keys + middle, mask=middle < top, other=0).to(tl.int32)
        below = (middle < top) & (key <= expert)
        after = tl.where(below, middle + 1, after)
        top = tl.where(below, top, middle)
    there = expert < experts
    filled = tl.where(there, (after - low + BLOCK - 1) // BLOCK * BLOCK, 0)
    end = tl.cumsum(filled, 0)
    tl.store(first + expert, low, mask=there)
    tl.store(
        first + experts + expert * 0, after, mask=expert == experts - 1
    )  # choices that are sent
    tl.store(begin + expert, end - filled, mask=there)
    tl.store(ends + expert, tl.where(expert == experts - 1, total, end), mask=there)


@fast_launch
@triton.jit
def _place_kernel(
    order,
    first,
    begin,
    ends,
    source,
    place,
    blocks,
    choices,
    total,
    experts,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    low = tl.zeros((TILE,), tl.int32)
    high = tl.zeros((TILE,), tl.int32) + (experts - 1)
    for _ in range(STEPS):  # the first expert whose rows end behind the slot
        middle = (low + high) // 2
        end = tl.load(ends + middle)
        low = tl.where((end <= slot) & (low < high), middle + 1, low)
        high = tl.where(end <= slot, high, middle)
    inside = slot < total
    at = tl.load(first + low) + slot - tl.load(begin + low)
    # first[experts] is the number of choices that are sent.
    given = inside & (at < tl.load(first + low + 1))
    choice = tl.load(order + at, mask=given, other=-1).to(tl.int32)
    tl.store(source + slot, choice, mask=inside)
    tl.store(place + choice, slot, mask=given)
    tl.store(blocks + slot // BLOCK, low, mask=inside & (slot % BLOCK == 0))
    dropped = (slot < choices) & (slot >= tl.load(first + experts))
    lost = tl.load(order + slot, mask=dropped, other=0).to(tl.int32)
    tl.store(place + lost, tl.full((TILE,), -1, tl.int32), mask=dropped)


def route(index: torch.Tensor, experts: int) -> ExpertRows:
    """See :func:`coat_dist.reference.routing.route`; the host waits for nothing, and there are as
    many rows as any choices could need.
    """
    flat, device = index.reshape(-1), index.device
    choices = flat.numel()
    if index.dtype != torch.uint8:
        flat = flat.clamp(-1, experts)
        flat = torch.where(flat < 0, experts, flat)
    keys, order = flat.to(torch.uint8 if experts < 256 else torch.int16).sort(stable=True)
    total = max((choices + (BLOCK - 1) * experts) // BLOCK * BLOCK, BLOCK)
    new = torch.empty(
        3 * experts + 1 + total + choices + total // BLOCK, dtype=torch.int32, device=device
    )
    sizes = experts + 1, experts, experts, total, choices, total // BLOCK
    first, begin, ends, source, place, blocks = new.split(sizes)
    _ends_kernel[(1,)](
        keys,
        first,
        begin,
        ends,
        choices,
        total,
        experts,
        STEPS=max(choices, 1).bit_length() + 1,
        E=next_power_of_2(experts),
        BLOCK=BLOCK,
        num_warps=4,
    )
    _place_kernel[(cdiv(max(total, choices), SLOTS),)](
        order,
        first,
        begin,
        ends,
        source,
        place,
        blocks,
        choices,
        total,
        experts,
        STEPS=experts.bit_length() + 1,
        TILE=SLOTS,
        BLOCK=BLOCK,
        num_warps=4,
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
