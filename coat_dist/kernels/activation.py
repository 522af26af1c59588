"""Activation kernels: the functions of ``reference/activation.py``.

The pre-activation is one tensor, [rows, parts, f]: with a gate (GATED) gate and up, of which a program takes the same
tile, otherwise one part. fc1's bias (BIAS) costs no pass of its own: it is added as pre is read. Backward's kernels are
in ``activation_backward.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, ActivationForward, ActivationRows
from .activation_backward import activation_backward, activation_grad_amax
from .activation_functions import activate, add_bias, load_part
from .fp8 import (
    amax_buffer,
    atomic_amax,
    constants,
    dense,
    group_decode,
    group_encode,
    inverse,
    magnitude_bits,
    pack_rows,
    parts,
    row_tiles,
    scale_of,
    store_turned,
    to_fp8,
)
from .launch import cdiv, fast_launch
from .quantize import launch_rows, packet

__all__ = [
    "activation_backward",
    "activation_compress",
    "activation_compress_rows",
    "activation_grad_amax",
    "activation_quantize",
]

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
COMPRESS_TILE = (8, 256, 4)
ROWS_TILE = (8, 256, 8)
TURNED_TILE = (64, 64, 4)
HELD_TILES = (1, 16, 4)  # tiles on their way; elements a thread of a tile; tiles of a row in registers, at most
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
    raw, bias, codes, scales, part, row, column, group, inside, in_group, columns, groups, C: tl.constexpr,
    EXACT: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, WRITE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    value = add_bias(raw.to(tl.float32), bias, part, column, inside, columns, BIAS)
    if WRITE or not EXACT:
        q, stored = group_encode(value, BM, BN, G, E8M0, C)
        if WRITE:
            tl.store(codes + (row * PARTS + part) * columns + column, q, mask=inside)
            tl.store(scales + (row * PARTS + part) * groups + group, stored, mask=in_group)
        if not EXACT:
            value = group_decode(q, stored, BM, BN, G, E8M0)
    return value


@triton.jit
def _compress_tile(
    raw, bias, codes, scales, row, column, group, inside, in_group, columns, groups, C: tl.constexpr,
    ACT: tl.constexpr, EXACT: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, WRITE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """The activation of a tile of :func:`_load_raw`; WRITE: the pre-activation in FP8 is stored."""
    g = _compress_part(
        raw[0], bias, codes, scales, 0, row, column, group, inside, in_group, columns, groups, C, EXACT, PARTS, BIAS,
        WRITE, BM, BN, G, E8M0,
    )  # fmt: skip
    value, _ = activate(g, ACT, C.fast)
    if PARTS == 2:
        value *= _compress_part(
            raw[1], bias, codes, scales, 1, row, column, group, inside, in_group, columns, groups, C, EXACT, PARTS,
            BIAS, WRITE, BM, BN, G, E8M0,
        )  # fmt: skip
    return value


@fast_launch
@triton.jit
def _compress_kernel(
    x, bias, codes, scales, amax, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    raw = _load_raw(x, row, column, inside, columns, PARTS)
    value = _compress_tile(
        raw, bias, codes, scales, row, column, group, inside, in_group, columns, groups, C, ACT, EXACT, PARTS, BIAS,
        True, BM, BN, G, E8M0,
    )  # fmt: skip
    atomic_amax(amax, magnitude_bits(value))


def activation_compress(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
) -> ActivationForward:
    """See :func:`coat_dist.reference.activation.activation_compress`."""
    columns = pre.shape[-1] // ACTIVATIONS[activation].parts
    flat = launch_rows(pre)
    pre8 = _pre8(pre, activation, fmt, group_size, scale)
    amax = amax_buffer(pre.device)
    bm, bn, warps = COMPRESS_TILE
    bn = max(bn, group_size)
    _compress_kernel[(cdiv(flat.shape[0], bm), cdiv(columns, bn))](
        flat, dense(bias), pre8.codes, pre8.scales, amax, flat.shape[0], columns, pre8.scales.shape[-1],
        **_constants(pre, activation, fmt, group_size, scale, exact, bias), BM=bm, BN=bn, num_warps=warps,
    )  # fmt: skip
    return ActivationForward(pre8, amax)


def _pre8(pre: torch.Tensor, activation: str, fmt: FP8Format, group_size: int, scale: str) -> QuantizedTensor:
    """Room for the pre-activation in FP8."""
    parts = ACTIVATIONS[activation].parts
    shape, columns = (*pre.shape[:-1], parts), pre.shape[-1] // parts
    codes = torch.empty(*shape, columns, dtype=fmt.dtype, device=pre.device)
    stored = torch.uint8 if scale == "e8m0" else torch.bfloat16
    scales = torch.empty(*shape, cdiv(columns, group_size), dtype=stored, device=pre.device)
    return QuantizedTensor(codes, scales, "group", group_size)


def _constants(pre, activation, fmt, group_size, scale, exact, bias) -> dict[str, Any]:
    """What both kernels that compress are compiled for."""
    act = ACTIVATIONS[activation]
    return {
        "C": constants(fmt, pre),
        "ACT": act.function,
        "PARTS": act.parts,
        "BIAS": bias is not None,
        "EXACT": exact,
        "G": group_size,
        "E8M0": scale == "e8m0",
    }


@triton.jit
def _row_tile(
    raw, bias, codes, scales, row, first, columns, groups, C: tl.constexpr, ACT: tl.constexpr, EXACT: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, WRITE: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr,
):  # fmt: skip
    """:func:`_compress_tile` of a row's columns from ``first`` on."""
    column = first + tl.arange(0, BN)[None, :]
    group = first // G + tl.arange(0, BN // G)[None, :]
    return _compress_tile(
        raw, bias, codes, scales, row, column, group, column < columns, group < groups, columns, groups, C, ACT, EXACT,
        PARTS, BIAS, WRITE, 1, BN, G, E8M0,
    )  # fmt: skip


@fast_launch
@triton.jit
def _compress_rows_kernel(
    x, bias, codes, scales, out, row_scales, columns, groups, C: tl.constexpr, ACT: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, AHEAD: tl.constexpr,
    HELD: tl.constexpr, LONG: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The activation of HELD tiles of a row stays in registers until the row's scale is known; LONG: there are more,
    and those are read and computed twice. AHEAD tiles are on their way while one is computed.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)[None, :]
    top = tl.zeros((1, BN), tl.int32)
    raw, held = (), ()  # tiles; a tuple, since Triton has no lists
    for i in tl.static_range(HELD + AHEAD):
        if i < HELD:
            raw = raw + (_load_raw(x, row, i * BN + column, i * BN + column < columns, columns, PARTS),)  # type: ignore
        if i >= AHEAD:
            value = _row_tile(
                raw[i - AHEAD], bias, codes, scales, row, (i - AHEAD) * BN, columns, groups, C, ACT, EXACT, PARTS, BIAS,
                True, BN, G, E8M0,
            )  # fmt: skip
            held = held + (value,)  # type: ignore[assignment]
    if LONG:
        for first in range(HELD * BN, columns, BN):
            tile = _load_raw(x, row, first + column, first + column < columns, columns, PARTS)
            more = _row_tile(
                tile, bias, codes, scales, row, first, columns, groups, C, ACT, EXACT, PARTS, BIAS, True, BN, G, E8M0
            )
            top = tl.maximum(top, magnitude_bits(more))
    for i in tl.static_range(HELD):
        top = tl.maximum(top, magnitude_bits(held[i]))
    scale, factor = scale_of(tl.max(top, 1), 0, C)
    tl.store(row_scales + row + tl.arange(0, 1), scale)
    out += row * columns
    for i in tl.static_range(HELD):
        tl.store(out + i * BN + column, to_fp8(held[i] * factor[:, None], C), mask=i * BN + column < columns)
    if LONG:
        for first in range(HELD * BN, columns, BN):
            tile = _load_raw(x, row, first + column, first + column < columns, columns, PARTS)
            more = _row_tile(
                tile, bias, codes, scales, row, first, columns, groups, C, ACT, EXACT, PARTS, BIAS, False, BN, G, E8M0
            )
            tl.store(out + first + column, to_fp8(more * factor[:, None], C), mask=first + column < columns)


def activation_compress_rows(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
) -> ActivationRows:
    """See :func:`coat_dist.reference.activation.activation_compress_rows`."""
    shape, columns = pre.shape[:-1], pre.shape[-1] // ACTIVATIONS[activation].parts
    flat = launch_rows(pre)
    pre8 = _pre8(pre, activation, fmt, group_size, scale)
    out = torch.empty(*shape, columns, dtype=fmt.dtype, device=pre.device)
    row_scales = torch.empty(*shape, 1, dtype=torch.float32, device=pre.device)
    ahead, elements, most = HELD_TILES
    width, held, long, warps = row_tiles(columns, elements, most, group_size)
    _compress_rows_kernel[(flat.shape[0],)](
        flat, dense(bias), pre8.codes, pre8.scales, out, row_scales, columns, pre8.scales.shape[-1],
        **_constants(pre, activation, fmt, group_size, scale, exact, bias), AHEAD=ahead, HELD=held, LONG=long,
        BN=width, num_warps=warps, maxnreg=HELD_REGISTERS,
    )  # fmt: skip
    return ActivationRows(pre8, QuantizedTensor(out, row_scales, "row"))


@fast_launch
@triton.jit
def _quantize_kernel(
    x, scales, bias, scale, out, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr,
):  # fmt: skip
    """PACK rows of codes make an element of a transposed ``out``; 0: ``out`` is not transposed."""
    PARTS: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = max(PACK, 1)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * BG + tl.arange(0, BG))[None, :]
    factor = inverse(scale)
    packed = tl.zeros((BM, BN), tl.int32)
    y = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        inside = (row < rows) & (column < columns)
        in_group = (row < rows) & (group < groups)
        g = load_part(
            x, scales, bias, 0, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, G, E8M0
        )  # fmt: skip
        value, _ = activate(g, ACT, C.fast)
        if GATED:
            value *= load_part(
                x, scales, bias, 1, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, G, E8M0
            )  # fmt: skip
        last, y = y, value * factor
        if PACK == 0:
            tl.store(out + row * columns + column, to_fp8(y, C), mask=inside)
        else:
            packed = pack_rows(packed, last, y, i, PACK, C)
    if PACK > 0:
        store_turned(out, packed, packet, column, rows // PACK, (packet < rows // PACK) & (column < columns))


def activation_quantize(
    pre: torch.Tensor | QuantizedTensor,
    activation: str,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    bias: torch.Tensor | None = None,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.activation.activation_quantize`."""
    act = ACTIVATIONS[activation]
    source, scales, size, e8m0 = parts(pre)
    shape = (*source.shape[:-2], source.shape[-1]) if size else (*source.shape[:-1], source.shape[-1] // act.parts)
    columns = shape[-1]
    flat = source.reshape(-1, act.parts * columns).contiguous()
    rows = flat.shape[0]
    out = torch.empty((columns, rows) if transpose else shape, dtype=fmt.dtype, device=source.device)
    bm, bn, warps = TURNED_TILE if transpose else ROWS_TILE
    bn = max(bn, size)
    pack, word = packet(rows) if transpose else (0, fmt.dtype)
    bm //= max(pack, 1)
    _quantize_kernel[(cdiv(rows, bm * max(pack, 1)), cdiv(columns, bn))](
        flat, scales, dense(bias), scale, out.view(word), rows, columns, cdiv(columns, size) if size else 0,
        C=constants(fmt, source), ACT=act.function, GATED=act.gated, BIAS=bias is not None, G=size, E8M0=e8m0,
        PACK=pack, BM=bm, BN=bn, BG=bn // size if size else 1, num_warps=warps,
    )  # fmt: skip
    return QuantizedTensor(out, scale, "tensor")
