"""Kernels of ``reference/routing.py``.

Choices are sorted by counting: one kernel counts the choices of each expert in each tile, another
adds up the counts and places them. Torch's sort and some forty operations behind it would cost more
on the host than on the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import QuantizedTensor, format_of
from ..reference.grouped import BLOCK, ExpertRows, most_rows
from .fp8 import constants
from .grouped import launch_take
from .launch import cdiv, fast_launch, next_power_of_2
from .quantize import launch_quantize

ROUTE_TILE = 1024  # choices of a program
ROUTE_ELEMENTS = 8192  # choices of a step times experts
TAKE_TILE = 1024  # words of a row


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
    total, tiles = most_rows(choices, experts), cdiv(choices, ROUTE_TILE)
    sizes = total, choices, total // BLOCK, experts, tiles * width
    new = index.new_empty(sum(sizes), dtype=torch.int32)
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


def take_codes(q: QuantizedTensor, rows: ExpertRows, choices: int = 1) -> QuantizedTensor:
    """See :func:`coat_dist.reference.routing.take_codes`."""
    total, width = rows.source.shape[0], q.codes.shape[1]
    out = q.codes.new_empty(total, width)
    given, scales = None, q.scales
    if q.layout == "row":
        given, scales = scales, scales.new_empty(total, 1)
    word = torch.int32 if width % 4 == 0 else torch.uint8
    launch_take(
        q.codes.view(word),
        rows.source,
        out.view(word),
        TAKE_TILE,
        scales=given,
        out_scales=scales,
        choices=choices,
    )
    return QuantizedTensor(out, scales, q.layout)


def take_codes_transposed(
    q: QuantizedTensor, rows: ExpertRows, choices: int, scales: torch.Tensor | None = None
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.routing.take_codes_transposed`."""
    turned = q.codes.new_empty(q.codes.shape[1], rows.source.shape[0])
    given, c, blocks, row_scales, layout = q.codes.view(torch.uint8), None, None, None, "tensor"
    if scales is None:
        scales = q.scales
    else:
        given, c = q.codes, constants(format_of(q.codes.dtype), q.codes)
        blocks, row_scales, layout = rows.blocks, q.scales, "expert"
    launch_quantize(
        given, scales, None, turned, c, blocks, row_scales, source=rows.source, choices=choices
    )
    return QuantizedTensor(turned, scales, layout)
