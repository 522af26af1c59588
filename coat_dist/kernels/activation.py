"""Activation kernels: the functions of ``reference/activation.py``.

The pre-activation is one tensor, [rows, parts, f]: with a gate gate and up, of which a
program takes the same tile, otherwise one part. fc1's bias costs no pass of its own: it is
added as pre is read. Kernels that compress the pre-activation are in ``activation_compress.py``,
those of backward in ``activation_backward.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, gates_first
from .activation_backward import (
    activation_backward,
    activation_factor_grad,
    activation_grad_amax,
)
from .activation_compress import activation_compress, activation_compress_rows
from .activation_functions import activate, linear, load_part, pre_constants
from .fp8 import constants, dense, inverse, pack_rows, store_turned, to_fp8
from .groups import place, unpack
from .launch import cdiv, fast_launch
from .quantize import packet

__all__ = [
    "activation_backward",
    "activation_compress",
    "activation_compress_rows",
    "activation_factor_grad",
    "activation_grad_amax",
    "activation_quantize",
]

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
ROWS_TILE = (8, 256, 8)
TURNED_TILE = (64, 64, 4)


@fast_launch
@triton.jit
def _quantize_kernel(
    x,
    scales,
    bias,
    scale,
    out,
    rows,
    columns,
    groups,
    C: tl.constexpr,
    P: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """PACK rows of codes make an element of a transposed ``out``; 0: ``out`` is not transposed."""
    ACT: tl.constexpr = P.act
    STEP: tl.constexpr = max(PACK, 1)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    factor = inverse(scale)
    packed = tl.zeros((BM, BN), tl.int32)
    y = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        at = place(row, tl.program_id(1), rows, columns, groups, BN, P.group_size)
        gate = load_part(x, scales, bias, 0, at, BM, BN, P)
        value, _ = activate(gate, ACT, C.fast)
        if P.parts == 2:
            up, _ = linear(load_part(x, scales, bias, 1, at, BM, BN, P), ACT)
            value *= up
        last, y = y, value * factor
        if PACK == 0:
            inside = (row < rows) & (column < columns)
            tl.store(out + row * columns + column, to_fp8(y, C), mask=inside)
        else:
            packed = pack_rows(packed, last, y, i, PACK, C)
    if PACK > 0:
        store_turned(
            out, packed, packet, column, rows // PACK, (packet < rows // PACK) & (column < columns)
        )


def activation_quantize(
    pre: torch.Tensor | QuantizedTensor,
    activation: str,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
    bias: torch.Tensor | None = None,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.activation.activation_quantize`."""
    source, scales, size, form = unpack(pre)
    act = ACTIVATIONS[activation]
    if not size:
        source, bias = gates_first(source, act), gates_first(bias, act)
    parts = act.parts
    shape = source.shape[:-2] if size else source.shape[:-1]
    columns = source.shape[-1] if size else source.shape[-1] // parts
    flat = source.reshape(-1, parts * columns).contiguous()
    rows = flat.shape[0]
    out = source.new_empty((columns, rows) if transpose else (*shape, columns), dtype=fmt.dtype)
    bm, bn, warps = TURNED_TILE if transpose else ROWS_TILE
    bn = max(bn, size)
    pack, word = packet(rows) if transpose else (0, fmt.dtype)
    bm //= max(pack, 1)
    _quantize_kernel[(cdiv(rows, bm * max(pack, 1)), cdiv(columns, bn))](
        flat,
        scales,
        dense(bias),
        scale,
        out.view(word),
        rows,
        columns,
        cdiv(columns, size) if size else 0,
        C=constants(fmt, source),
        P=pre_constants(activation, form, size, bias),
        PACK=pack,
        BM=bm,
        BN=bn,
        num_warps=warps,
    )
    return QuantizedTensor(out, scale, "tensor")
