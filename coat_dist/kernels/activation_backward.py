"""Activation kernels of backward, which the functions of the same names in
``reference/activation.py`` define.

The second pass reads da and all parts once and writes their gradients, the same transposed, and the
activation transposed: no intermediate of size f is ever written in BF16. The gradient of fc1's bias
costs no pass of its own: it is summed by columns of each tile.

Tiles that are written transposed are taken by packets of four rows, as in ``kernels/quantize.py``.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..formats import E4M3, FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, ActivationGradients
from ..reference.grouped import BLOCK, ExpertRows
from .activation_functions import backward, pre_constants
from .fp8 import (
    amax_buffer,
    atomic_amax,
    constants,
    dense,
    inverse,
    magnitude_bits,
    pack_rows,
    store_turned,
    to_fp8,
)
from .groups import place, place_from, unpack
from .launch import cdiv, fast_launch
from .quantize import packet

# Rows, columns, warps of a tile; measured as benchmarks/speed/flow_kernels.py does.
AMAX_TILE = (8, 256, 4)
BACKWARD_TILE = (BLOCK, 128, 4)
FACTOR_TILE = (8, 256, 4)


@fast_launch
@triton.jit
def _backward_kernel(
    da,
    x,
    scales,
    grad_scale,
    scale,
    blocks,
    weight,
    source,
    amax,
    d8,
    d8_t,
    a8_t,
    dbias,
    stride,
    rows,
    columns,
    groups,
    D: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PACK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """PACK rows of codes make an element of a transposed result; 0: nothing is written but the
    amax. ``blocks``: the expert of each BLOCK rows, whose scales and amax they have; ``weight`` of
    what ``source`` counts multiplies a row's activation. ``stride``: of d8_t, where it has gaps.
    """
    STEP: tl.constexpr = max(PACK, 1)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    first, behind = column, columns  # of the gate, and how far up is behind it
    if P.act.interleaved:
        first, behind = 2 * column, 1
    zero = tl.zeros((BM, BN), tl.float32)
    gate, up, act = zero, zero, zero  # what goes into the codes, of the row before
    gates, ups, acts = (tl.zeros((BM, BN), tl.int32),) * 3  # packets
    gate_sum, up_sum = zero, zero
    if blocks is not None:
        expert = tl.load(blocks + tl.program_id(0) * BM * STEP // BLOCK)
        if PACK > 0:
            grad_scale += expert
            scale += expert
        else:
            amax += expert
    if PACK > 0:
        grad_factor = inverse(grad_scale)
        factor = inverse(scale)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        at = place(row, tl.program_id(1), rows, columns, groups, BN, P.group_size)
        inside = (row < rows) & (column < columns)
        grad = tl.load(da + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if weight is not None:
            choice = tl.load(source + row, mask=row < rows, other=-1).to(tl.int64)
            times = tl.load(weight + choice, mask=choice >= 0, other=0.0).to(tl.float32)
            grad *= times
        value, dg, du, _ = backward(grad, x, scales, at, BM, BN, P, C.fast)
        if PACK == 0:
            bits = magnitude_bits(dg)
            if P.parts == 2:
                bits = tl.maximum(bits, magnitude_bits(du))
            atomic_amax(amax, bits)
        else:
            if weight is not None:
                value *= times
            to = d8 + row * P.parts * columns + column
            last, act = act, value * factor
            acts = pack_rows(acts, last, act, i, PACK, C)
            last, gate = gate, dg * grad_factor
            gates = pack_rows(gates, last, gate, i, PACK, D)
            if not P.act.interleaved:
                tl.store(to, to_fp8(gate, D), mask=inside)
            if P.parts == 2:
                last, up = up, du * grad_factor
                ups = pack_rows(ups, last, up, i, PACK, D)
                if P.act.interleaved:
                    pairs = tl.join(to_fp8(gate, D), to_fp8(up, D)).reshape(BM, 2 * BN)
                    both = tl.program_id(1) * 2 * BN + tl.arange(0, 2 * BN)[None, :]
                    there = (row < rows) & (both < 2 * columns)
                    tl.store(d8 + row * 2 * columns + both, pairs, mask=there)
                else:
                    tl.store(to + columns, to_fp8(up, D), mask=inside)
            if dbias is not None:
                gate_sum += dg
                up_sum += du
    if PACK > 0:
        height = rows // PACK
        there = (packet < height) & (column < columns)
        store_turned(a8_t, acts, packet, column, height, there)
        if stride is not None:
            height = stride // PACK
        store_turned(d8_t, gates, packet, first, height, there)
        at = tl.program_id(0).to(tl.int64) * P.parts * columns + first
        if P.parts == 2:
            up_t = d8_t + tl.full((), 1, tl.int64) * behind * height
            store_turned(up_t, ups, packet, first, height, there)
        if dbias is not None:
            tl.store(dbias + at, tl.sum(gate_sum, 0)[None, :], mask=column < columns)
            if P.parts == 2:
                tl.store(dbias + at + behind, tl.sum(up_sum, 0)[None, :], mask=column < columns)


def _backward(
    da,
    pre8,
    activation,
    grad_scale,
    scale,
    amax,
    outputs,
    grad_fmt,
    fmt,
    pack,
    tile,
    experts,
    factor=None,
) -> None:
    columns = da.shape[-1]
    flat = da.reshape(-1, columns).contiguous()
    rows = flat.shape[0]
    codes, scales, size, form = unpack(pre8)
    bm, bn, warps = tile
    _backward_kernel[(cdiv(rows, bm), cdiv(columns, bn))](
        flat,
        codes,
        scales,
        grad_scale,
        scale,
        None if experts is None else experts.blocks,
        dense(factor),
        None if factor is None else experts.source,
        amax,
        *outputs,
        rows,
        columns,
        cdiv(columns, size),
        D=constants(grad_fmt, da),
        C=constants(fmt, da),
        P=pre_constants(activation, form, size),
        PACK=pack,
        BM=bm // max(pack, 1),
        BN=max(bn, size),
        BLOCK=BLOCK,
        num_warps=warps,
    )


def activation_grad_amax(
    da: torch.Tensor, pre8: QuantizedTensor, activation: str, rows: ExpertRows | None = None
) -> torch.Tensor:
    """See :func:`coat_dist.reference.activation.activation_grad_amax`."""
    if rows is None:
        amax = amax_buffer(da.device)
    else:
        amax = da.new_zeros(rows.experts, dtype=torch.float32)
    _backward(da, pre8, activation, None, None, amax, (None,) * 5, E4M3, E4M3, 0, AMAX_TILE, rows)
    return amax


def activation_backward(
    da: torch.Tensor,
    pre8: QuantizedTensor,
    activation: str,
    grad_fmt: FP8Format,
    grad_scale: torch.Tensor,
    fmt: FP8Format,
    scale: torch.Tensor,
    bias_sum: torch.dtype | None = None,
    rows: ExpertRows | None = None,
    factor: torch.Tensor | None = None,
    d8_t: torch.Tensor | None = None,
) -> ActivationGradients:
    """See :func:`coat_dist.reference.activation.activation_backward`.

    The bias's gradient: fp32 sums of each tile's rows, then their sum in ``bias_sum``; those of an
    expert by a product with zeros and ones. In the same order every time.
    """
    height, columns = da.shape
    width = columns * ACTIVATIONS[activation].parts
    tiles = cdiv(height, BACKWARD_TILE[0])
    d8 = da.new_empty(height, width, dtype=grad_fmt.dtype)
    stride = None
    if d8_t is None:
        d8_t = da.new_empty(width, height, dtype=grad_fmt.dtype)
    else:
        stride = d8_t.stride(0)
    a8_t = da.new_empty(columns, height, dtype=fmt.dtype)
    sums = None if bias_sum is None else da.new_empty(tiles, width, dtype=torch.float32)
    # Rows of d8_t have to begin at whole words.
    pack, word = packet(math.gcd(height, d8_t.stride(0), d8_t.storage_offset()))
    outputs = d8, d8_t.view(word), a8_t.view(word), sums, stride
    _backward(
        da,
        pre8,
        activation,
        grad_scale,
        scale,
        None,
        outputs,
        grad_fmt,
        fmt,
        pack,
        BACKWARD_TILE,
        rows,
        factor,
    )
    layout = "tensor" if rows is None else "expert"
    dbias = None if sums is None else sums.sum(0, dtype=bias_sum)
    if sums is not None and rows is not None:
        owners = rows.blocks == torch.arange(rows.experts, device=da.device)[:, None]
        dbias = owners.to(bias_sum) @ sums.to(bias_sum)
    return ActivationGradients(
        QuantizedTensor(d8, grad_scale, layout),
        QuantizedTensor(d8_t, grad_scale, layout),
        QuantizedTensor(a8_t, scale, layout),
        dbias,
    )


@fast_launch
@triton.jit
def _factor_kernel(
    da,
    x,
    scales,
    factor,
    source,
    blocks,
    amax,
    dfactor,
    rows,
    columns,
    groups,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BM rows whole, of one expert: the gradient of each row's factor is a sum over its columns."""
    G: tl.constexpr = P.group_size
    slot = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    choice = tl.load(source + slot, mask=slot < rows, other=-1).to(tl.int64)
    times = tl.load(factor + choice, mask=choice >= 0, other=0.0).to(tl.float32)[:, None]
    top = tl.zeros((BM, BN), tl.int32)
    sums = tl.zeros((BM, BN), tl.float32)
    row = slot[:, None]
    for first in range(0, columns, BN):
        at = place_from(row, first, first // G, rows, columns, groups, BN, BN // G)
        _, column, _, inside, _, _, _ = at
        grad = tl.load(da + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        _, dg, du, product = backward(grad, x, scales, at, BM, BN, P, P.saved.fast)
        top = tl.maximum(top, magnitude_bits(dg * times))
        sums += product
        if P.parts == 2:
            top = tl.maximum(top, magnitude_bits(du * times))
    atomic_amax(amax + tl.load(blocks + tl.program_id(0) * BM // BLOCK), top)
    tl.store(dfactor + choice, tl.sum(sums, 1).to(dfactor.dtype.element_ty), mask=choice >= 0)


def activation_factor_grad(
    da: torch.Tensor,
    pre8: QuantizedTensor,
    activation: str,
    rows: ExpertRows,
    factor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`coat_dist.reference.activation.activation_factor_grad`."""
    columns = da.shape[1]
    codes, scales, size, form = unpack(pre8)
    amax = da.new_zeros(rows.experts, dtype=torch.float32)
    dfactor = torch.zeros_like(factor, memory_format=torch.contiguous_format)
    height, width, warps = FACTOR_TILE
    _factor_kernel[(cdiv(da.shape[0], height),)](
        da,
        codes,
        scales,
        dense(factor),
        rows.source,
        rows.blocks,
        amax,
        dfactor,
        da.shape[0],
        columns,
        cdiv(columns, size),
        P=pre_constants(activation, form, size),
        BM=height,
        BN=max(width, size),
        BLOCK=BLOCK,
        num_warps=warps,
    )
    return amax, dfactor
