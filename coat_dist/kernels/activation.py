"""Activation kernels: the functions of ``reference/activation.py``.

The pre-activation is one tensor, [rows, parts, f]: with a gate (GATED) gate and up, of which a program takes the same
tile, otherwise one part. Backward's second pass reads da and all parts once and writes their gradients, the same
transposed, and the activation transposed: no intermediate of size f is ever written in BF16. fc1's bias (BIAS) costs
no pass of its own: it is added as pre is read, and its gradient is summed by columns of each tile.

Tiles that are written transposed are taken by packets of four rows, as in ``kernels/quantize.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import E4M3, FP8Format, QuantizedTensor
from ..reference.activation import ACTIVATIONS, ActivationForward, ActivationGradients
from .approximations import exp2, sigmoid
from .fp8 import (
    amax_buffer,
    atomic_amax,
    constants,
    group_decode,
    group_encode,
    inverse,
    load_tile,
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
AMAX_TILE = (8, 256, 4)
BACKWARD_TILE = (32, 256, 8)


@triton.jit
def _activate(g, ACT: tl.constexpr, FAST: tl.constexpr):
    """Value and derivative of the function called ACT."""
    if ACT == "squared_relu":
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
        slope = 2.0 * r
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * exp2(g * g * -0.7213475204444817, FAST) * 0.3989422804014327
    else:  # g * sigmoid(z); "inner" is dz/dg
        if ACT == "silu":
            z = g
            inner = 1.0
        elif ACT == "quick_gelu":
            z = g * 1.702
            inner = 1.702
        else:
            tl.static_assert(ACT == "gelu_tanh")
            z = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
            inner = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        s = sigmoid(z, FAST)
        value = g * s
        slope = s + value * (1.0 - s) * inner
    return value, slope


@triton.jit
def _load_part(
    x, scales, bias, part, row, column, group, inside, in_group, columns, groups,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """A tile of the gate (part 0) or of up (part 1), fp32, from plain values (G = 0) or from per-group codes."""
    at = row * PARTS + part
    out = load_tile(x, scales, at, column, group, inside, in_group, columns, groups, BM, BN, G, E8M0)
    if BIAS:  # zero outside, where an amax would see it
        more = tl.load(bias + part * columns + column, mask=column < columns, other=0.0)
        out = tl.where(inside, out + more.to(tl.float32), 0.0)
    return out


@triton.jit
def _compress_part(
    x, bias, codes, scales, part, row, column, group, inside, in_group, columns, groups, C: tl.constexpr,
    EXACT: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr,
):  # fmt: skip
    value = _load_part(
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
    value, _ = _activate(g, ACT, C.fast)
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
        g = _load_part(
            x, scales, bias, 0, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, G, E8M0
        )  # fmt: skip
        value, _ = _activate(g, ACT, C.fast)
        if GATED:
            value *= _load_part(
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


@fast_launch
@triton.jit
def _backward_kernel(
    da, x, scales, grad_scale, scale, amax, d8, d8_t, a8_t, dbias, rows, columns, groups,
    D: tl.constexpr, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """PACK rows of codes make an element of a transposed result; 0: nothing is written but the amax."""
    PARTS: tl.constexpr = 2 if GATED else 1
    STEP: tl.constexpr = max(PACK, 1)
    packet = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    zero = tl.zeros((BM, BN), tl.float32)
    gate, up, act = zero, zero, zero  # what goes into the codes, of the row before
    gates, ups, acts = (tl.zeros((BM, BN), tl.int32),) * 3  # packets
    gate_sum, up_sum = zero, zero
    if PACK > 0:
        grad_factor = inverse(grad_scale)
        factor = inverse(scale)
    for i in tl.static_range(STEP):
        row = packet.to(tl.int64) * STEP + i
        inside = (row < rows) & (column < columns)
        in_group = (row < rows) & (group < groups)
        grad = tl.load(da + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        g = _load_part(
            x, scales, None, 0, row, column, group, inside, in_group, columns, groups, PARTS, False, BM, BN, G, E8M0
        )  # fmt: skip
        value, slope = _activate(g, ACT, C.fast)
        du = grad * value
        if GATED:
            u = _load_part(
                x, scales, None, 1, row, column, group, inside, in_group, columns, groups, PARTS, False, BM, BN, G, E8M0
            )  # fmt: skip
            grad *= u
            value *= u
        dg = grad * slope
        if PACK == 0:
            bits = magnitude_bits(dg)
            if GATED:
                bits = tl.maximum(bits, magnitude_bits(du))
            atomic_amax(amax, bits)
        else:
            at = row * PARTS * columns + column
            last, act = act, value * factor
            acts = pack_rows(acts, last, act, i, PACK, C)
            last, gate = gate, dg * grad_factor
            gates = pack_rows(gates, last, gate, i, PACK, D)
            tl.store(d8 + at, to_fp8(gate, D), mask=inside)
            if GATED:
                last, up = up, du * grad_factor
                ups = pack_rows(ups, last, up, i, PACK, D)
                tl.store(d8 + at + columns, to_fp8(up, D), mask=inside)
            if BIAS:
                gate_sum += dg
                up_sum += du
    if PACK > 0:
        height = rows // PACK
        there = (packet < height) & (column < columns)
        store_turned(a8_t, acts, packet, column, height, there)
        store_turned(d8_t, gates, packet, column, height, there)
        at = tl.program_id(0).to(tl.int64) * PARTS * columns + column
        if GATED:
            up_t = d8_t + tl.full((), 1, tl.int64) * columns * height
            store_turned(up_t, ups, packet, column, height, there)
        if BIAS:
            tl.store(dbias + at, tl.sum(gate_sum, 0)[None, :], mask=column < columns)
            if GATED:
                tl.store(dbias + at + columns, tl.sum(up_sum, 0)[None, :], mask=column < columns)


def _backward(da, pre8, activation, grad_scale, scale, amax, outputs, grad_fmt, fmt, pack, tile) -> None:
    act, columns = ACTIVATIONS[activation], da.shape[-1]
    flat = da.reshape(-1, columns).contiguous()
    rows, size = flat.shape[0], pre8.group_size
    bm, bn, warps = tile
    _backward_kernel[(cdiv(rows, bm), cdiv(columns, bn))](
        flat, pre8.codes, pre8.scales, grad_scale, scale, amax, *outputs, rows, columns,
        cdiv(columns, size), D=constants(grad_fmt, da), C=constants(fmt, da), ACT=act.function,
        GATED=act.gated, BIAS=outputs[-1] is not None, G=size, E8M0=pre8.scales.dtype == torch.uint8,
        PACK=pack, BM=bm // max(pack, 1), BN=max(bn, size), num_warps=warps,
    )  # fmt: skip


def activation_grad_amax(da: torch.Tensor, pre8: QuantizedTensor, activation: str) -> torch.Tensor:
    """See :func:`coat_dist.reference.activation.activation_grad_amax`."""
    amax = amax_buffer(da.device)
    _backward(da, pre8, activation, None, None, amax, (None,) * 4, E4M3, E4M3, 0, AMAX_TILE)
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
) -> ActivationGradients:
    """See :func:`coat_dist.reference.activation.activation_backward`.

    The bias's gradient: fp32 sums of each tile's rows, then their sum in ``bias_sum``. In the same order every time.
    """
    (rows, columns), width, device = da.shape, da.shape[1] * ACTIVATIONS[activation].parts, da.device
    tiles = cdiv(rows, BACKWARD_TILE[0])
    d8 = torch.empty(rows, width, dtype=grad_fmt.dtype, device=device)
    d8_t = torch.empty(width, rows, dtype=grad_fmt.dtype, device=device)
    a8_t = torch.empty(columns, rows, dtype=fmt.dtype, device=device)
    sums = None if bias_sum is None else torch.empty(tiles, width, dtype=torch.float32, device=device)
    pack, word = packet(rows)
    outputs = d8, d8_t.view(word), a8_t.view(word), sums
    _backward(da, pre8, activation, grad_scale, scale, None, outputs, grad_fmt, fmt, pack, BACKWARD_TILE)
    return ActivationGradients(
        QuantizedTensor(d8, grad_scale, "tensor"),
        QuantizedTensor(d8_t, grad_scale, "tensor"),
        QuantizedTensor(a8_t, scale, "tensor"),
        None if sums is None else sums.sum(0, dtype=bias_sum),
    )
