"""Activation kernels that compress fc1's output in forward: ``activation_compress`` and
``activation_compress_rows``.

Both read the pre-activation once and write it in 8 bits by groups. The first works on tiles and
leaves the activation's amax, for a second pass; the second takes a row a program and writes the
activation in FP8 with a scale per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ActivationForward, ActivationRows, gates_first
from ..reference.grouped import BLOCK
from .activation_functions import Pre, activate, add_bias, linear, pre_constants
from .fp8 import (
    amax_buffer,
    atomic_amax,
    atomic_top,
    constants,
    dense,
    magnitude_bits,
    row_tiles,
    scale_of,
    to_fp8,
)
from .groups import group_decode, group_encode, place, place_from, room, saved_as
from .launch import cdiv, fast_launch
from .quantize import launch_rows

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
COMPRESS_TILE = (8, 256, 4)
# Tiles on their way; elements a thread of a tile; tiles of a row in registers, at most.
HELD_TILES = (1, 16, 4)
HELD_REGISTERS = 128  # a thread: two programs of 8 warps at a time


@triton.jit
def _load_raw(x, at, P: tl.constexpr):
    """A tile of plain values of each part, as they lie in memory; of one part alone, twice."""
    row, column, _, inside, _, columns, _ = at
    if P.act.interleaved:
        both = (row * columns + column)[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        gate, up = tl.split(tl.load(x + both, mask=inside[:, :, None], other=0.0))
    else:
        gate = tl.load(x + row * P.parts * columns + column, mask=inside, other=0.0)
        up = gate
        if P.parts == 2:
            up = tl.load(x + (row * P.parts + 1) * columns + column, mask=inside, other=0.0)
    return gate, up


@triton.jit
def _compress_part(
    raw,
    bias,
    codes,
    scales,
    part,
    at,
    P: tl.constexpr,
    EXACT: tl.constexpr,
    WRITE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    S: tl.constexpr = P.saved
    value = add_bias(raw.to(tl.float32), bias, part, at, P)
    if WRITE or not EXACT:
        q, stored = group_encode(value, BM, BN, P.group_size, S)
        if WRITE:
            row, column, group, inside, in_group, columns, groups = at
            row = row * P.parts + part
            tl.store(codes + row * columns + column, q, mask=inside)
            tl.store(scales + row * groups + group, stored, mask=in_group)
        if not EXACT:
            value = group_decode(q, stored, BM, BN, P.group_size, S)
    return value


@triton.jit
def _compress_tile(
    raw,
    bias,
    codes,
    scales,
    at,
    P: tl.constexpr,
    EXACT: tl.constexpr,
    WRITE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The activation of a tile of :func:`_load_raw`; WRITE: the pre-activation in FP8 is stored."""
    g = _compress_part(raw[0], bias, codes, scales, 0, at, P, EXACT, WRITE, BM, BN)
    ACT: tl.constexpr = P.act
    value, _ = activate(g, ACT, P.saved.fast)
    if P.parts == 2:
        up = _compress_part(raw[1], bias, codes, scales, 1, at, P, EXACT, WRITE, BM, BN)
        up, _ = linear(up, ACT)
        value *= up
    return value


@fast_launch
@triton.jit
def _compress_kernel(
    x,
    bias,
    codes,
    scales,
    amax,
    rows,
    columns,
    groups,
    P: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    at = place(row, tl.program_id(1), rows, columns, groups, BN, P.group_size)
    raw = _load_raw(x, at, P)
    value = _compress_tile(raw, bias, codes, scales, at, P, EXACT, True, BM, BN)
    atomic_amax(amax, magnitude_bits(value))


def activation_compress(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
    saved: FP8Format | None = None,
) -> ActivationForward:
    """See :func:`coat_dist.reference.activation.activation_compress`."""
    flat = launch_rows(pre)
    pre8, p = _saved(pre, activation, saved or fmt, group_size, scale, bias)
    columns, groups = pre8.codes.shape[-1], pre8.scales.shape[-1]
    amax = amax_buffer(pre.device)
    bm, bn, warps = COMPRESS_TILE
    bn = max(bn, group_size)
    _compress_kernel[(cdiv(flat.shape[0], bm), cdiv(columns, bn))](
        flat,
        dense(gates_first(bias, p.act)),
        pre8.codes,
        pre8.scales,
        amax,
        flat.shape[0],
        columns,
        groups,
        P=p,
        EXACT=exact,
        BM=bm,
        BN=bn,
        num_warps=warps,
    )
    return ActivationForward(pre8, amax)


def _saved(
    pre: torch.Tensor,
    activation: str,
    saved: FP8Format,
    group_size: int,
    scale: str,
    bias: torch.Tensor | None,
) -> tuple[QuantizedTensor, Pre]:
    """Room for the pre-activation in FP8, and what kernels are compiled for."""
    p = pre_constants(activation, saved_as(saved, scale, pre), group_size, bias)
    shape = *pre.shape[:-1], p.parts, pre.shape[-1] // p.parts
    return room(shape, saved, group_size, scale, pre.device), p


@fast_launch
@triton.jit
def _compress_rows_kernel(
    x,
    bias,
    blocks,
    codes,
    scales,
    out,
    row_scales,
    top_scale,
    columns,
    groups,
    C: tl.constexpr,
    P: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    LONG: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The activation of HELD tiles of a row stays in registers until the row's scale is known;
    LONG: there are more, and those are read and computed twice. AHEAD tiles are on their way while
    one is computed. ``blocks``: the expert of each BLOCK rows, whose bias they have.
    """
    G: tl.constexpr = P.group_size
    row = tl.program_id(0).to(tl.int64)
    if blocks is not None:
        bias += tl.load(blocks + row // BLOCK) * P.parts * columns
    column = tl.arange(0, BN)[None, :]
    top = tl.zeros((1, BN), tl.int32)
    raw, held = (), ()  # tiles; a tuple, since Triton has no lists
    for i in tl.static_range(HELD + AHEAD):
        if i < HELD:
            at = place(row, i, None, columns, groups, BN, G)
            raw = raw + (_load_raw(x, at, P),)  # type: ignore
        if i >= AHEAD:
            at = place(row, i - AHEAD, None, columns, groups, BN, G)
            value = _compress_tile(raw[i - AHEAD], bias, codes, scales, at, P, EXACT, True, 1, BN)
            held = held + (value,)  # type: ignore[assignment]
    if LONG:
        for first in range(HELD * BN, columns, BN):
            at = place_from(row, first, first // G, None, columns, groups, BN, BN // G)
            more = _compress_tile(
                _load_raw(x, at, P), bias, codes, scales, at, P, EXACT, True, 1, BN
            )
            top = tl.maximum(top, magnitude_bits(more))
    for i in tl.static_range(HELD):
        top = tl.maximum(top, magnitude_bits(held[i]))
    seen = tl.load(top_scale)
    scale, factor = scale_of(tl.max(top, 1), 23, C)
    tl.store(row_scales + row + tl.arange(0, 1), scale)
    atomic_top(top_scale, scale, seen)
    out += row * columns
    for i in tl.static_range(HELD):
        tl.store(
            out + i * BN + column,
            to_fp8(held[i] * factor[:, None], C),
            mask=i * BN + column < columns,
        )
    if LONG:
        for first in range(HELD * BN, columns, BN):
            at = place_from(row, first, first // G, None, columns, groups, BN, BN // G)
            more = _compress_tile(
                _load_raw(x, at, P), bias, codes, scales, at, P, EXACT, False, 1, BN
            )
            _, offset, _, inside, _, _, _ = at
            tl.store(out + offset, to_fp8(more * factor[:, None], C), mask=inside)


def activation_compress_rows(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
    saved: FP8Format | None = None,
    blocks: torch.Tensor | None = None,
) -> ActivationRows:
    """See :func:`coat_dist.reference.activation.activation_compress_rows`."""
    flat = launch_rows(pre)
    pre8, p = _saved(pre, activation, saved or fmt, group_size, scale, bias)
    columns, groups = pre8.codes.shape[-1], pre8.scales.shape[-1]
    out = pre.new_empty(*pre.shape[:-1], columns, dtype=fmt.dtype)
    row_scales = pre.new_empty(*pre.shape[:-1], 1, dtype=torch.float32)
    top = amax_buffer(pre.device)
    ahead, elements, most = HELD_TILES
    width, held, long, warps = row_tiles(columns, elements, most, group_size)
    _compress_rows_kernel[(flat.shape[0],)](
        flat,
        dense(gates_first(bias, p.act)),
        None if bias is None else blocks,
        pre8.codes,
        pre8.scales,
        out,
        row_scales,
        top,
        columns,
        groups,
        C=constants(fmt, pre),
        P=p,
        EXACT=exact,
        AHEAD=ahead,
        HELD=held,
        LONG=long,
        BN=width,
        BLOCK=BLOCK,
        num_warps=warps,
        maxnreg=HELD_REGISTERS,
    )
    return ActivationRows(
        pre8, QuantizedTensor(out, row_scales, "row", top=top if flat.shape[0] else None)
    )
