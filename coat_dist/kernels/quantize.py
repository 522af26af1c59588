"""Quantization kernels: the functions of ``reference/quantize.py`` that touch whole tensors, with
the same codes.

One read of the input and one write of each result; what of a row exceeds a program's registers is
read twice where the row has a scale. Codes are transposed as packets: four rows of a column are one
int32, put together in registers, so that the exchange between threads and the stores move words
instead of bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.grouped import BLOCK
from .fp8 import (
    Format,
    amax_buffer,
    atomic_amax,
    atomic_top,
    constants,
    from_fp8,
    inverse,
    magnitude_bits,
    pack_rows,
    row_tiles,
    scale_of,
    store_turned,
    to_fp8,
)
from .groups import group_encode, load_tile, place, room, saved_as, unpack
from .launch import cdiv, fast_launch

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
AMAX_TILE = (16384, 8)
GROUPS_TILE = (16, 256, 4)
ROWS_TILE = (32, 256, 4)
TURNED_TILE = (128, 128, 8)
TURNED_BLOCK = (BLOCK, 256, 8)
HELD_TILES = (16, 4)  # elements a thread of a tile; tiles of a row that stay in registers, at most


@fast_launch
@triton.jit
def _amax_kernel(x, out, n, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    offset = tl.arange(0, TILE)
    value = tl.load(x + first + offset, mask=offset < n - first, other=0.0).to(tl.float32)
    atomic_amax(out, magnitude_bits(value))


def amax(x: torch.Tensor) -> torch.Tensor:
    """See :func:`coat_dist.reference.quantize.amax` (over everything)."""
    x, out = x.contiguous(), amax_buffer(x.device)
    tile, warps = AMAX_TILE
    if x.numel():
        _amax_kernel[(cdiv(x.numel(), tile),)](x, out, x.numel(), TILE=tile, num_warps=warps)
    return out


@fast_launch
@triton.jit
def _scale_kernel(amax, scale, n, C: tl.constexpr, DROP: tl.constexpr, TILE: tl.constexpr):
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = magnitude_bits(tl.load(amax + offset, mask=offset < n, other=0.0))
    tl.store(scale + offset, scale_of(top, DROP, C)[0], mask=offset < n)


def tensor_scale(amax: torch.Tensor, fmt: FP8Format, aligned: bool = False) -> torch.Tensor:
    """See :func:`coat_dist.reference.quantize.tensor_scale`: one launch instead of five."""
    amax = amax.contiguous()
    scale, n = torch.empty_like(amax), amax.numel()
    if n:
        _scale_kernel[(cdiv(n, 1024),)](
            amax,
            scale,
            n,
            C=constants(fmt, amax),
            DROP=23 if aligned else 0,
            TILE=1024,
            num_warps=4,
        )
    return scale


@fast_launch
@triton.jit
def _tensor_kernel(
    x,
    row_scales,
    scale,
    blocks,
    source,
    out,
    turned,
    choices,
    rows,
    columns,
    stride,
    C: tl.constexpr,
    MANY: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The arguments of :func:`launch_quantize`. MANY: a program's third index is that of its matrix
    and scale. PACK rows of codes make an element of ``turned``, whose rows are ``stride`` codes
    apart (None: ``rows``); 0: nothing is transposed.
    """
    STEP: tl.constexpr = max(PACK, 1)
    if MANY:
        matrix = tl.program_id(2).to(tl.int64)
        x += matrix * rows * columns
        scale += matrix
        if row_scales is not None:
            row_scales += matrix * rows
        if out is not None:
            out += matrix * rows * columns
        if turned is not None:
            turned += matrix * columns * (rows // max(PACK, 1))
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    packed = tl.zeros((BM, BN), tl.int32)
    if C is not None:
        if blocks is not None:
            scale += tl.load(blocks + tl.program_id(0) * BM * STEP // BLOCK)
        factor = inverse(scale)
        y = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        at, there = row, row < rows
        if source is not None:
            choice = tl.load(source + row, mask=row < rows, other=-1)
            at, there = (choice // choices).to(tl.int64), choice >= 0
        value = tl.load(x + at * columns + column, mask=there & (column < columns), other=0.0)
        if C is None:
            packed |= value.to(tl.int32) << (8 * i)
        else:
            last = y
            if row_scales is None:
                y = value.to(tl.float32) * factor
            else:  # the factor of a row first: with powers of two nothing is rounded before codes
                times = tl.load(row_scales + at, mask=there, other=0.0) * factor
                y = from_fp8(value) * times
            if out is not None:
                inside = (row < rows) & (column < columns)
                tl.store(out + row * columns + column, to_fp8(y, C), mask=inside)
            if PACK > 0:
                packed = pack_rows(packed, last, y, i, PACK, C)
    if PACK > 0:
        inside = (packet < rows // PACK) & (column < columns)
        apart = rows if stride is None else stride
        store_turned(turned, packed, packet, column, apart // PACK, inside)


def launch_rows(x: torch.Tensor) -> torch.Tensor:
    """x seen as contiguous rows ``[rows, n]``."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def packet(rows: int) -> tuple[int, torch.dtype]:
    """How many rows of codes are transposed as one element, and the type of that element."""
    return (4, torch.int32) if rows and rows % 4 == 0 else (1, torch.uint8)


def quantize_tensor(
    x: torch.Tensor | QuantizedTensor,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.quantize_tensor`."""
    row_scales = None
    if isinstance(x, QuantizedTensor):
        row_scales, x = x.scales, x.codes
    flat = launch_rows(x)
    codes = out
    if codes is None:
        codes = x.new_empty(flat.shape[::-1] if transpose else x.shape, dtype=fmt.dtype)
    rows, turned = (None, codes) if transpose else (codes, None)
    launch_quantize(flat, scale, rows, turned, constants(fmt, x), row_scales=row_scales)
    return QuantizedTensor(codes, scale, "tensor")


def quantize_both(
    x: torch.Tensor, fmt: FP8Format, scale: torch.Tensor
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """See :func:`coat_dist.reference.quantize.quantize_both`."""
    flat = launch_rows(x)
    codes = x.new_empty(x.shape, dtype=fmt.dtype)
    turned = x.new_empty(flat.shape[::-1], dtype=fmt.dtype)
    launch_quantize(flat, scale, codes, turned, constants(fmt, x))
    return QuantizedTensor(codes, scale, "tensor"), QuantizedTensor(turned, scale, "tensor")


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.transpose`."""
    codes = q.codes.new_empty(q.codes.shape[::-1])
    # As bytes: nothing is converted, and the format does not matter.
    launch_quantize(q.codes.contiguous().view(torch.uint8), q.scales, None, codes, None)
    return QuantizedTensor(codes, q.scales, q.layout)


def launch_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor | None,
    turned: torch.Tensor | None,
    c: Format | None,
    blocks: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    choices: int = 1,
) -> None:
    """Codes of x (its bytes, where ``c`` is None) into ``out`` and, transposed, into ``turned``.

    Args:
        x: ``[rows, columns]``; or several matrices ``[experts, rows, columns]``, each with its
            scale.
        blocks: of several scales, which is that of each
            :data:`~coat_dist.reference.grouped.BLOCK` rows.
        row_scales: of x, contiguous; x is FP8 by rows then.
        source: row i is that of number ``source[i] // choices`` in x, zeros if negative.
    """
    *matrices, rows, columns = x.shape
    if source is not None:
        rows = source.shape[0]
    if 0 in (*matrices, rows, columns):
        return
    bm, bn, warps = ROWS_TILE
    pack = 0
    stride: int | None = 0
    if turned is not None:
        bm, bn, warps = TURNED_TILE if blocks is None else TURNED_BLOCK
        pack, word = packet(rows)
        if matrices or source is not None:
            stride = None  # codes have no gaps; a number less saves registers
        else:
            stride = turned.stride(0)
            # columns of a wider matrix have to begin at whole words
            if turned.stride(0) % 4 or turned.storage_offset() % 4:
                pack, word = packet(1)
        turned = turned.view(word)
        bm //= pack
    _tensor_kernel[(cdiv(rows, bm * max(pack, 1)), cdiv(columns, bn), *matrices)](
        x,
        row_scales,
        scale,
        blocks,
        source,
        out,
        turned,
        choices,
        rows,
        columns,
        stride,
        C=c,
        MANY=bool(matrices),
        PACK=pack,
        BM=bm,
        BN=bn,
        BLOCK=BLOCK,
        num_warps=warps,
    )


@fast_launch
@triton.jit
def _groups_kernel(
    x,
    codes,
    scales,
    rows,
    columns,
    groups,
    G: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    at = place(row, tl.program_id(1), rows, columns, groups, BN, G)
    _, column, group, inside, in_group, _, _ = at
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    q, stored = group_encode(value, BM, BN, G, S)
    tl.store(codes + row * columns + column, q, mask=inside)
    tl.store(scales + row * groups + group, stored, mask=in_group)


def quantize_groups(
    x: torch.Tensor, fmt: FP8Format, group_size: int, scale: str
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.quantize_groups`."""
    flat = launch_rows(x)
    rows, columns = flat.shape
    q = room(x.shape, fmt, group_size, scale, x.device)
    bm, bn, warps = GROUPS_TILE
    if x.numel():
        _groups_kernel[(cdiv(rows, bm), cdiv(columns, bn))](
            flat,
            q.codes,
            q.scales,
            rows,
            columns,
            q.scales.shape[-1],
            G=group_size,
            S=saved_as(fmt, scale, x),
            BM=bm,
            BN=max(bn, group_size),
            num_warps=warps,
        )
    return q


@fast_launch
@triton.jit
def _rows_kernel(
    x,
    out,
    scales,
    top_scale,
    columns,
    C: tl.constexpr,
    DROP: tl.constexpr,
    HELD: tl.constexpr,
    LONG: tl.constexpr,
    BN: tl.constexpr,
):
    """HELD tiles of a row stay in registers; LONG: there are more, and those are read twice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)[None, :]
    x += row * columns
    out += row * columns
    held = ()  # tiles; a tuple, since Triton has no lists
    for i in tl.static_range(HELD):
        held = held + (tl.load(x + i * BN + column, mask=column < columns - i * BN, other=0.0),)  # type: ignore
    top = tl.zeros((1, BN), tl.int32)
    for i in tl.static_range(HELD):
        top = tl.maximum(top, magnitude_bits(held[i].to(tl.float32)))
    if LONG:
        for first in range(HELD * BN, columns, BN):
            more = tl.load(x + first + column, mask=column < columns - first, other=0.0).to(
                tl.float32
            )
            top = tl.maximum(top, magnitude_bits(more))
    seen = tl.load(top_scale)
    scale, factor = scale_of(tl.max(top, 1), DROP, C)
    tl.store(scales + row + tl.arange(0, 1), scale)
    atomic_top(top_scale, scale, seen)
    for i in tl.static_range(HELD):
        codes = to_fp8(held[i].to(tl.float32) * factor[:, None], C)
        tl.store(out + i * BN + column, codes, mask=column < columns - i * BN)
    if LONG:
        for first in range(HELD * BN, columns, BN):
            inside = column < columns - first
            more = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + first + column, to_fp8(more * factor[:, None], C), mask=inside)


def quantize_rows(
    x: torch.Tensor, fmt: FP8Format, aligned: bool = False, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.quantize.quantize_rows`."""
    flat = launch_rows(x)
    rows, columns = flat.shape
    width, held, long, warps = row_tiles(columns, *HELD_TILES)
    if out is None:
        codes = x.new_empty(x.shape, dtype=fmt.dtype)
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        top = amax_buffer(x.device) if rows else None
    else:
        codes, scales, top = out.codes, out.scales, out.top
    if rows:
        _rows_kernel[(rows,)](
            flat,
            codes,
            scales,
            top,
            columns,
            C=constants(fmt, x),
            DROP=23 if aligned else 0,
            HELD=held,
            LONG=long,
            BN=width,
            num_warps=warps,
        )
    return QuantizedTensor(codes, scales, "row", top=top)


@fast_launch
@triton.jit
def _dequantize_groups_kernel(
    codes,
    scales,
    out,
    rows,
    columns,
    groups,
    G: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    at = place(row, tl.program_id(1), rows, columns, groups, BN, G)
    _, column, group, inside, in_group, _, _ = at
    value = load_tile(
        codes, scales, row, column, group, inside, in_group, columns, groups, BM, BN, G, S
    )
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def _dequantize_rows_kernel(codes, scales, out, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    inside = (row < rows) & (column < columns)
    value = from_fp8(tl.load(codes + row * columns + column, mask=inside, other=0.0))
    scale = tl.load(scales + row, mask=row < rows, other=0.0)
    tl.store(out + row * columns + column, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See :func:`coat_dist.reference.quantize.dequantize`; kernels are for groups and for rows."""
    codes = launch_rows(q.codes)
    rows, columns = codes.shape
    tensor = q.layout == "tensor"
    scales = q.scales.expand(rows).contiguous() if tensor else launch_rows(q.scales)
    out = codes.new_empty(q.codes.shape, dtype=dtype)
    bm, bn, warps = GROUPS_TILE
    grid = cdiv(rows, bm), cdiv(columns, bn)
    if codes.numel() and q.layout != "group":
        _dequantize_rows_kernel[grid](
            codes, scales, out, rows, columns, BM=bm, BN=bn, num_warps=warps
        )
    elif codes.numel():
        _dequantize_groups_kernel[grid](
            codes,
            scales,
            out,
            rows,
            columns,
            scales.shape[1],
            G=q.group_size,
            S=unpack(q)[3],
            BM=bm,
            BN=max(bn, q.group_size),
            num_warps=warps,
        )
    return out
