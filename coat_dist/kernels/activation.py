"""Activation kernels: the functions of ``reference/activation.py``.

The pre-activation is one tensor, [rows, parts, f]: with a gate (GATED) gate and up, of which a program takes the same
tile, otherwise one part. fc1's bias (BIAS) costs no pass of its own: it is added as pre is read. Backward's kernels are
in ``activation_backward.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, ActivationForward
from .activation_backward import activation_backward, activation_grad_amax
from .activation_functions import activate, load_part
from .fp8 import (
    amax_buffer,
    atomic_amax,
    constants,
    group_decode,
    group_encode,
    inverse,
    magnitude_bits,
    pack_rows,
    parts,
    store_turned,
    to_fp8,
)
from .launch import cdiv, fast_launch
from .quantize import packet

__all__ = ["activation_backward", "activation_compress", "activation_grad_amax", "activation_quantize"]

# Rows, columns, warps of a tile; measured as benchmarks/flow_kernels.py does.
COMPRESS_TILE = (8, 256, 4)
ROWS_TILE = (8, 256, 8)
TURNED_TILE = (64, 64, 4)


@triton.jit
def _compress_part(
    x, bias, codes, scales, part, row, column, group, inside, in_group, columns, groups, C: tl.constexpr,
    EXACT: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr,
):  # fmt: skip
    value = load_part(
        x, None, bias, part, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, 0, E8M0
    )
    q, stored = group_encode(value, BM, BN, G, E8M0, C)
    tl.store(codes + (row * PARTS + part) * columns + column, q, mask=inside)
    tl.store(scales + (row * PARTS + part) * groups + group, stored, mask=in_group)
    if not EXACT:
        value = group_decode(q, stored, BM, BN, G, E8M0)
    return value


@fast_launch
@triton.jit
def _compress_kernel(
    x, bias, codes, scales, amax, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    g = _compress_part(
        x, bias, codes, scales, 0, row, column, group, inside, in_group, columns, groups, C, EXACT, PARTS, BIAS,
        BM, BN, G, E8M0,
    )  # fmt: skip
    value, _ = activate(g, ACT, C.fast)
    if GATED:
        value *= _compress_part(
            x, bias, codes, scales, 1, row, column, group, inside, in_group, columns, groups, C, EXACT, PARTS, BIAS,
            BM, BN, G, E8M0,
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
    act = ACTIVATIONS[activation]
    columns = pre.shape[-1] // act.parts
    flat = pre.reshape(-1, pre.shape[-1]).contiguous()
    groups, e8m0, device = cdiv(columns, group_size), scale == "e8m0", pre.device
    shape = (*pre.shape[:-1], act.parts)
    codes = torch.empty(*shape, columns, dtype=fmt.dtype, device=device)
    scales = torch.empty(*shape, groups, dtype=torch.uint8 if e8m0 else torch.bfloat16, device=device)
    amax = amax_buffer(device)
    bm, bn, warps = COMPRESS_TILE
    bn = max(bn, group_size)
    _compress_kernel[(cdiv(flat.shape[0], bm), cdiv(columns, bn))](
        flat, bias, codes, scales, amax, flat.shape[0], columns, groups, C=constants(fmt, pre), ACT=act.function,
        GATED=act.gated, BIAS=bias is not None, EXACT=exact, G=group_size, E8M0=e8m0, BM=bm, BN=bn,
        num_warps=warps,
    )  # fmt: skip
    return ActivationForward(QuantizedTensor(codes, scales, "group", group_size), amax)


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
        flat, scales, bias, scale, out.view(word), rows, columns, cdiv(columns, size) if size else 0,
        C=constants(fmt, source), ACT=act.function, GATED=act.gated, BIAS=bias is not None, G=size, E8M0=e8m0,
        PACK=pack, BM=bm, BN=bn, BG=bn // size if size else 1, num_warps=warps,
    )  # fmt: skip
    return QuantizedTensor(out, scale, "tensor")
