"""Activation kernels that compress fc1's output in forward: ``activation_compress`` and
``activation_compress_rows``.

Both read the pre-activation once and write it in 8 bits by groups. The first works on tiles and
leaves the activation's amax, for a second pass; the second takes a row a program and writes the
activation in FP8 with a scale per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, ActivationForward, ActivationRows
from .activation_functions import activate, add_bias
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
from .groups import group_decode, group_encode, room, saved_as
from .launch import cdiv, fast_launch
from .quantize import launch_rows

__all__ = ["activation_compress", "activation_compress_rows"]

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
COMPRESS_TILE = (8, 256, 4)
# Tiles on their way; elements a thread of a tile; tiles of a row in registers, at most.
HELD_TILES = (1, 16, 4)
HELD_REGISTERS = 128  # a thread: two programs of 8 warps at a time


@triton.jit
def _load_raw(x, row, column, inside, columns, PARTS: tl.constexpr):
    """A tile of plain values of each part, as they lie in memory; of one part alone, twice."""
    gate = tl.load(x + row * PARTS * columns + column, mask=inside, other=0.0)
    up = gate
    if PARTS == 2:
        up = tl.load(x + (row * PARTS + 1) * columns + column, mask=inside, other=0.0)
    return gate, up


@triton.jit
def _compress_part(
    raw,
    bias,
    codes,
    scales,
    part,
    row,
    column,
    group,
    inside,
    in_group,
    columns,
    groups,
    S: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    value = add_bias(raw.to(tl.float32), bias, part, column, inside, columns, BIAS)
    if WRITE or not EXACT:
        q, stored = group_encode(value, BM, BN, G, S)
        if WRITE:
            tl.store(codes + (row * PARTS + part) * columns + column, q, mask=inside)
            tl.store(scales + (row * PARTS + part) * groups + group, stored, mask=in_group)
        if not EXACT:
            value = group_decode(q, stored, BM, BN, G, S)
    return value


@triton.jit
def _compress_tile(
    raw,
    bias,
    codes,
    scales,
    row,
    column,
    group,
    inside,
    in_group,
    columns,
    groups,
    S: tl.constexpr,
    ACT: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """The activation of a tile of :func:`_load_raw`; WRITE: the pre-activation in FP8 is stored."""
    g = _compress_part(
        raw[0],
        bias,
        codes,
        scales,
        0,
        row,
        column,
        group,
        inside,
        in_group,
        columns,
        groups,
        S,
        EXACT,
        PARTS,
        BIAS,
        WRITE,
        BM,
        BN,
        G,
    )
    value, _ = activate(g, ACT, S.fast)
    if PARTS == 2:
        value *= _compress_part(
            raw[1],
            bias,
            codes,
            scales,
            1,
            row,
            column,
            group,
            inside,
            in_group,
            columns,
            groups,
            S,
            EXACT,
            PARTS,
            BIAS,
            WRITE,
            BM,
            BN,
            G,
        )
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
    S: tl.constexpr,
    ACT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    G: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    raw = _load_raw(x, row, column, inside, columns, PARTS)
    value = _compress_tile(
        raw,
        bias,
        codes,
        scales,
        row,
        column,
        group,
        inside,
        in_group,
        columns,
        groups,
        S,
        ACT,
        EXACT,
        PARTS,
        BIAS,
        True,
        BM,
        BN,
        G,
    )
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
    columns = pre.shape[-1] // ACTIVATIONS[activation].parts
    flat = launch_rows(pre)
    pre8 = _pre8(pre, activation, saved or fmt, group_size, scale)
    amax = amax_buffer(pre.device)
    bm, bn, warps = COMPRESS_TILE
    bn = max(bn, group_size)
    _compress_kernel[(cdiv(flat.shape[0], bm), cdiv(columns, bn))](
        flat,
        dense(bias),
        pre8.codes,
        pre8.scales,
        amax,
        flat.shape[0],
        columns,
        pre8.scales.shape[-1],
        **_constants(pre, activation, saved or fmt, group_size, scale, exact, bias),
        BM=bm,
        BN=bn,
        num_warps=warps,
    )
    return ActivationForward(pre8, amax)


def _pre8(
    pre: torch.Tensor, activation: str, saved: FP8Format, group_size: int, scale: str
) -> QuantizedTensor:
    """Room for the pre-activation in FP8."""
    parts = ACTIVATIONS[activation].parts
    return room(
        (*pre.shape[:-1], parts, pre.shape[-1] // parts), saved, group_size, scale, pre.device
    )


def _constants(pre, activation, saved, group_size, scale, exact, bias) -> dict[str, Any]:
    """What both kernels that compress are compiled for."""
    act = ACTIVATIONS[activation]
    return {
        "S": saved_as(saved, scale, pre),
        "ACT": act.function,
        "PARTS": act.parts,
        "BIAS": bias is not None,
        "EXACT": exact,
        "G": group_size,
    }


@triton.jit
def _row_tile(
    raw,
    bias,
    codes,
    scales,
    row,
    first,
    columns,
    groups,
    S: tl.constexpr,
    ACT: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    WRITE: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """:func:`_compress_tile` of a row's columns from ``first`` on."""
    column = first + tl.arange(0, BN)[None, :]
    group = first // G + tl.arange(0, BN // G)[None, :]
    return _compress_tile(
        raw,
        bias,
        codes,
        scales,
        row,
        column,
        group,
        column < columns,
        group < groups,
        columns,
        groups,
        S,
        ACT,
        EXACT,
        PARTS,
        BIAS,
        WRITE,
        1,
        BN,
        G,
    )


@fast_launch
@triton.jit
def _compress_rows_kernel(
    x,
    bias,
    codes,
    scales,
    out,
    row_scales,
    top_scale,
    columns,
    groups,
    C: tl.constexpr,
    S: tl.constexpr,
    ACT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    G: tl.constexpr,
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
    LONG: tl.constexpr,
    BN: tl.constexpr,
):
    """The activation of HELD tiles of a row stays in registers until the row's scale is known;
    LONG: there are more, and those are read and computed twice. AHEAD tiles are on their way while
    one is computed.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)[None, :]
    top = tl.zeros((1, BN), tl.int32)
    raw, held = (), ()  # tiles; a tuple, since Triton has no lists
    for i in tl.static_range(HELD + AHEAD):
        if i < HELD:
            raw = raw + (
                _load_raw(x, row, i * BN + column, i * BN + column < columns, columns, PARTS),
            )  # type: ignore
        if i >= AHEAD:
            value = _row_tile(
                raw[i - AHEAD],
                bias,
                codes,
                scales,
                row,
                (i - AHEAD) * BN,
                columns,
                groups,
                S,
                ACT,
                EXACT,
                PARTS,
                BIAS,
                True,
                BN,
                G,
            )
            held = held + (value,)  # type: ignore[assignment]
    if LONG:
        for first in range(HELD * BN, columns, BN):
            tile = _load_raw(x, row, first + column, first + column < columns, columns, PARTS)
            more = _row_tile(
                tile,
                bias,
                codes,
                scales,
                row,
                first,
                columns,
                groups,
                S,
                ACT,
                EXACT,
                PARTS,
                BIAS,
                True,
                BN,
                G,
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
            tile = _load_raw(x, row, first + column, first + column < columns, columns, PARTS)
            more = _row_tile(
                tile,
                bias,
                codes,
                scales,
                row,
                first,
                columns,
                groups,
                S,
                ACT,
                EXACT,
                PARTS,
                BIAS,
                False,
                BN,
                G,
            )
            tl.store(
                out + first + column,
                to_fp8(more * factor[:, None], C),
                mask=first + column < columns,
            )


def activation_compress_rows(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
    saved: FP8Format | None = None,
) -> ActivationRows:
    """See :func:`coat_dist.reference.activation.activation_compress_rows`."""
    shape, columns = pre.shape[:-1], pre.shape[-1] // ACTIVATIONS[activation].parts
    flat = launch_rows(pre)
    pre8 = _pre8(pre, activation, saved or fmt, group_size, scale)
    out = torch.empty(*shape, columns, dtype=fmt.dtype, device=pre.device)
    row_scales = torch.empty(*shape, 1, dtype=torch.float32, device=pre.device)
    top = amax_buffer(pre.device)
    ahead, elements, most = HELD_TILES
    width, held, long, warps = row_tiles(columns, elements, most, group_size)
    _compress_rows_kernel[(flat.shape[0],)](
        flat,
        dense(bias),
        pre8.codes,
        pre8.scales,
        out,
        row_scales,
        top,
        columns,
        pre8.scales.shape[-1],
        **_constants(pre, activation, saved or fmt, group_size, scale, exact, bias),
        C=constants(fmt, pre),
        AHEAD=ahead,
        HELD=held,
        LONG=long,
        BN=width,
        num_warps=warps,
        maxnreg=HELD_REGISTERS,
    )
    return ActivationRows(
        pre8, QuantizedTensor(out, row_scales, "row", top=top if flat.shape[0] else None)
    )
