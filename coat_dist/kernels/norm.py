"""Norm kernels: the functions of ``reference/norm.py``.

Row statistics are fp32 sums here and fp64 sums in the definition, so ``rstd`` may differ in its
last bits, and a code where a value sits that close to the middle between two. Passes that need
whole rows take a row a program, in registers; :func:`norm_quantize`, which has the statistics,
works on tiles and can write its result transposed. Backward is in ``norm_backward.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.norm import NormForward, NormRows, NormStats
from .fp8 import (
    amax_buffer,
    atomic_amax,
    atomic_top,
    constants,
    dense,
    inverse,
    magnitude_bits,
    pack_rows,
    scale_of,
    store_turned,
    to_fp8,
)
from .groups import group_decode, group_encode, load_tile, room, saved_as, unpack
from .launch import cdiv, fast_launch, next_power_of_2
from .norm_backward import norm_backward
from .quantize import launch_rows, packet

__all__ = ["norm_backward", "norm_compress", "norm_compress_rows", "norm_forward", "norm_quantize"]

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
ROWS_TILE = (32, 256, 4)
TURNED_TILE = (128, 128, 8)
COMPRESS_WARPS = 4


@triton.jit
def _affine(y, weight, bias, column, inside, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    if WEIGHT:
        y = y * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y = y + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _load_row(x, row, column, inside, columns, CENTER: tl.constexpr):
    """A row, fp32, less its mean, and the mean; without CENTER the row, and 0."""
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    center = tl.zeros((1,), tl.float32)
    if CENTER:
        center = tl.sum(value, 1) / columns
        value = tl.where(inside, value - center[:, None], 0.0)
    return value, center


@triton.jit
def _normalize(value, center, rstd, mean, row, columns, eps, CENTER: tl.constexpr):
    """A centered row times its rstd; stores rstd and mean."""
    spread = tl.sum(value * value, 1) / columns
    reciprocal = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(spread + eps))
    if CENTER:
        tl.store(mean + row + tl.arange(0, 1), center)
    tl.store(rstd + row + tl.arange(0, 1), reciprocal)
    return value * reciprocal[:, None]


@fast_launch
@triton.jit
def _compress_kernel(
    x,
    weight,
    bias,
    codes,
    scales,
    rstd,
    mean,
    top,
    y8,
    y_scales,
    columns,
    groups,
    eps,
    C: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    EXACT: tl.constexpr,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """Of x, codes of S are written. Of y, ROWS writes codes of C with a scale per row, the largest
    into ``top``; otherwise its amax, into ``top``, is all there is.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)[None, :]
    inside = column < columns
    value, center = _load_row(x, row, column, inside, columns, CENTER)
    q, stored = group_encode(value, 1, BN, G, S)
    tl.store(codes + row * columns + column, q, mask=inside)
    group = tl.arange(0, BN // G)[None, :]
    tl.store(scales + row * groups + group, stored, mask=group < groups)
    if not EXACT:
        value = group_decode(q, stored, 1, BN, G, S)
    value = _normalize(value, center, rstd, mean, row, columns, eps, CENTER)
    y = _affine(value, weight, bias, column, inside, WEIGHT, BIAS)
    bits = magnitude_bits(tl.where(inside, y, 0.0))
    if ROWS:
        seen = tl.load(top)
        scale, factor = scale_of(tl.max(bits, 1), 23, C)
        tl.store(y_scales + row + tl.arange(0, 1), scale)
        atomic_top(top, scale, seen)
        tl.store(y8 + row * columns + column, to_fp8(y * factor[:, None], C), mask=inside)
    else:
        atomic_amax(top, bits)


def norm_compress(
    x: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    saved: FP8Format | None = None,
) -> NormForward:
    """See :func:`coat_dist.reference.norm.norm_compress`."""
    return NormForward(
        *_compress(x, kind, eps, weight, bias, fmt, saved or fmt, group_size, scale, exact, None)
    )


def norm_compress_rows(
    x: torch.Tensor,
    kind: str,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    saved: FP8Format | None = None,
    out: QuantizedTensor | None = None,
) -> NormRows:
    """See :func:`coat_dist.reference.norm.norm_compress_rows`."""
    y8 = out
    if y8 is None:
        codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
        scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        y8 = QuantizedTensor(codes, scales, "row")
    x8, stats, top = _compress(
        x, kind, eps, weight, bias, fmt, saved or fmt, group_size, scale, exact, y8
    )
    y8.top = top if x8.codes.numel() else None
    return NormRows(x8, stats, y8)


def _compress(
    x, kind, eps, weight, bias, fmt, saved, size, scale, exact, y8: QuantizedTensor | None
) -> tuple[QuantizedTensor, NormStats, torch.Tensor]:
    """x8, the statistics, and the amax of y; or, if ``y8`` is to be written, the largest of its
    scales.
    """
    flat = launch_rows(x)
    rows, columns = flat.shape
    x8, center = room(x.shape, saved, size, scale, x.device), kind == "layernorm"
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if center else None
    top = amax_buffer(x.device)
    y_codes, y_scales = (None, None) if y8 is None else (y8.codes, y8.scales)
    _compress_kernel[(rows,)](
        flat,
        dense(weight),
        dense(bias),
        x8.codes,
        x8.scales,
        rstd,
        mean,
        top,
        y_codes,
        y_scales,
        columns,
        x8.scales.shape[-1],
        eps,
        C=constants(fmt, x),
        S=saved_as(saved, scale, x),
        G=size,
        EXACT=exact,
        CENTER=center,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        ROWS=y8 is not None,
        BN=max(next_power_of_2(columns), size),
        num_warps=COMPRESS_WARPS,
    )
    return x8, NormStats(rstd, mean), top


@fast_launch
@triton.jit
def _forward_kernel(
    x,
    weight,
    bias,
    y,
    rstd,
    mean,
    columns,
    eps,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BN)[None, :]
    inside = column < columns
    value, center = _load_row(x, row, column, inside, columns, CENTER)
    value = _normalize(value, center, rstd, mean, row, columns, eps, CENTER)
    out = _affine(value, weight, bias, column, inside, WEIGHT, BIAS)
    tl.store(y + row * columns + column, out.to(y.dtype.element_ty), mask=inside)


def norm_forward(
    x: torch.Tensor, kind: str, eps: float, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, NormStats]:
    """See :func:`coat_dist.reference.norm.norm_forward`."""
    flat = launch_rows(x)
    rows, columns = flat.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if kind == "layernorm" else None
    _forward_kernel[(rows,)](
        flat,
        dense(weight),
        dense(bias),
        y,
        rstd,
        mean,
        columns,
        eps,
        CENTER=mean is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        BN=next_power_of_2(columns),
        num_warps=4 if columns <= 2048 else 8,
    )
    return y, NormStats(rstd, mean)


@fast_launch
@triton.jit
def _norm_quantize_kernel(
    x,
    scales,
    rstd,
    mean,
    weight,
    bias,
    scale,
    out,
    rows,
    columns,
    groups,
    C: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """PACK rows of codes make an element of a transposed ``out``; 0: ``out`` is not transposed."""
    STEP: tl.constexpr = max(PACK, 1)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * BG + tl.arange(0, BG))[None, :]
    factor = inverse(scale)
    packed = tl.zeros((BM, BN), tl.int32)
    y = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        here = row < rows
        inside = here & (column < columns)
        value = load_tile(
            x,
            scales,
            row,
            column,
            group,
            inside,
            here & (group < groups),
            columns,
            groups,
            BM,
            BN,
            G,
            S,
        )
        if CENTER:
            value = value - tl.load(mean + row, mask=here, other=0.0)
        value = value * tl.load(rstd + row, mask=here, other=0.0)
        value = _affine(value, weight, bias, column, column < columns, WEIGHT, BIAS)
        last, y = y, value * factor
        if PACK == 0:
            tl.store(out + row * columns + column, to_fp8(y, C), mask=inside)
        else:
            packed = pack_rows(packed, last, y, i, PACK, C)
    if PACK > 0:
        store_turned(
            out, packed, packet, column, rows // PACK, (packet < rows // PACK) & (column < columns)
        )


def norm_quantize(
    x: torch.Tensor | QuantizedTensor,
    stats: NormStats,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.norm.norm_quantize`."""
    source, scales, size, form = unpack(x)
    mean = stats.mean if scales is None else None  # x8 has none
    flat = launch_rows(source)
    rows, columns = flat.shape
    if out is None:
        out = torch.empty(
            (columns, rows) if transpose else source.shape, dtype=fmt.dtype, device=source.device
        )
    bm, bn, warps = TURNED_TILE if transpose else ROWS_TILE
    bn = max(bn, size)
    pack, word = packet(rows) if transpose else (0, fmt.dtype)
    bm //= max(pack, 1)
    _norm_quantize_kernel[(cdiv(rows, bm * max(pack, 1)), cdiv(columns, bn))](
        flat,
        scales,
        stats.rstd,
        mean,
        dense(weight),
        dense(bias),
        scale,
        out.view(word),
        rows,
        columns,
        cdiv(columns, size) if size else 0,
        C=constants(fmt, source),
        G=size,
        S=form,
        CENTER=mean is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        PACK=pack,
        BM=bm,
        BN=bn,
        BG=bn // size if size else 1,
        num_warps=warps,
    )
    return QuantizedTensor(out, scale, "tensor")
