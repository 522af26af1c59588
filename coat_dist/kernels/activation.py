"""Gated-activation kernels: the functions of ``reference/activation.py``.

Gate and up are two halves of one tensor, [rows, 2, f]; a program takes the same tile of both. Backward's second pass
reads da, gate and up once and writes the gradient of both halves, the same transposed, and the activation transposed:
no intermediate of size 2 f is ever written in BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import FP8Format, QuantizedTensor
from ..reference import activation as reference
from ..reference.activation import ActivationForward, ActivationGradients
from .fp8 import amax_buffer, atomic_amax, constants, group_decode, group_encode, parts, read_amax, to_fp8

__all__ = ["activation_backward", "activation_compress", "activation_grad_amax", "activation_quantize"]


@triton.jit
def _activate(g, ACT: tl.constexpr):
    """Value and derivative of the gate's function."""
    if ACT == "swiglu":
        s = 1.0 / (1.0 + tl.exp(-g))
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif ACT == "geglu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    else:
        inner = 0.7978845608028654 * g * (1.0 + 0.044715 * g * g)
        t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        value = 0.5 * g * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * (0.7978845608028654 * (1.0 + 0.134145 * g * g))
    return value, slope


@triton.jit
def _load_half(
    x, scales, half, row, column, group, inside, in_group, columns, groups,
    BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """A tile of the gate (half 0) or of up (half 1), fp32, from plain values (G = 0) or from per-group codes."""
    value = tl.load(x + (row * 2 + half) * columns + column, mask=inside, other=0.0)
    if G == 0:
        out = value.to(tl.float32)
    else:
        stored = tl.load(scales + (row * 2 + half) * groups + group, mask=in_group, other=0)
        out = group_decode(value, stored, BM, BN, G, E8M0)
    return out


@triton.jit
def _compress_half(
    x, codes, scales, half, row, column, group, inside, in_group, columns, groups,
    C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    at = (row * 2 + half) * columns + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    q, stored = group_encode(value, BM, BN, G, E8M0, C)
    tl.store(codes + at, q, mask=inside)
    tl.store(scales + (row * 2 + half) * groups + group, stored, mask=in_group)
    return value


@triton.jit
def _compress_kernel(
    x, codes, scales, amax, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    g = _compress_half(x, codes, scales, 0, row, column, group, inside, in_group, columns, groups, C, BM, BN, G, E8M0)
    u = _compress_half(x, codes, scales, 1, row, column, group, inside, in_group, columns, groups, C, BM, BN, G, E8M0)
    value, _ = _activate(g, ACT)
    atomic_amax(amax, value * u)


def activation_compress(
    gate_up: torch.Tensor, activation: str, fmt: FP8Format, group_size: int, scale: str, exact: bool
) -> ActivationForward:
    """See :func:`coat_dist.reference.activation.activation_compress`; with ``exact`` only, see ``kernels/norm.py``."""
    if not exact:
        return reference.activation_compress(gate_up, activation, fmt, group_size, scale, exact)
    columns = gate_up.shape[-1] // 2
    flat = gate_up.reshape(-1, 2 * columns).contiguous()
    groups, e8m0, device = triton.cdiv(columns, group_size), scale == "e8m0", gate_up.device
    shape = (*gate_up.shape[:-1], 2)
    codes = torch.empty(*shape, columns, dtype=fmt.dtype, device=device)
    scales = torch.empty(*shape, groups, dtype=torch.uint8 if e8m0 else torch.bfloat16, device=device)
    amax = amax_buffer(device)
    bm, bn = 16, 128
    with torch.cuda.device_of(gate_up):
        _compress_kernel[(triton.cdiv(flat.shape[0], bm), triton.cdiv(columns, bn))](
            flat, codes, scales, amax, flat.shape[0], columns, groups, C=constants(fmt, gate_up), ACT=activation,
            G=group_size, E8M0=e8m0, BM=bm, BN=bn, num_warps=4,
        )  # fmt: skip
    return ActivationForward(QuantizedTensor(codes, scales, "group", group_size), read_amax(amax))


@triton.jit
def _quantize_kernel(
    x, scales, scale, out, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr, TRANSPOSE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * BG + tl.arange(0, BG))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    g = _load_half(x, scales, 0, row, column, group, inside, in_group, columns, groups, BM, BN, G, E8M0)
    u = _load_half(x, scales, 1, row, column, group, inside, in_group, columns, groups, BM, BN, G, E8M0)
    value, _ = _activate(g, ACT)
    q = to_fp8(value * u * _inverse(scale), C)
    if TRANSPOSE:
        tl.store(out + tl.trans(column).to(tl.int64) * rows + tl.trans(row), tl.trans(q), mask=tl.trans(inside))
    else:
        tl.store(out + row * columns + column, q, mask=inside)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full((1, 1), 1.0, tl.float32), tl.load(scale) + tl.zeros((1, 1), tl.float32))


def activation_quantize(
    gate_up: torch.Tensor | QuantizedTensor,
    activation: str,
    fmt: FP8Format,
    scale: torch.Tensor,
    transpose: bool = False,
) -> QuantizedTensor:
    """See :func:`coat_dist.reference.activation.activation_quantize`."""
    source, scales, size, e8m0 = parts(gate_up)
    shape = (*source.shape[:-2], source.shape[-1]) if size else (*source.shape[:-1], source.shape[-1] // 2)
    columns = shape[-1]
    flat = source.reshape(-1, 2 * columns).contiguous()
    rows = flat.shape[0]
    out = torch.empty((columns, rows) if transpose else shape, dtype=fmt.dtype, device=source.device)
    bm, bn = (64, 64) if transpose else (16, 256)
    with torch.cuda.device_of(source):
        _quantize_kernel[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](
            flat, scales, scale, out, rows, columns, triton.cdiv(columns, size) if size else 0,
            C=constants(fmt, source), ACT=activation, G=size, E8M0=e8m0,
            TRANSPOSE=transpose, BM=bm, BN=bn, BG=bn // size if size else 1, num_warps=4,
        )  # fmt: skip
    return QuantizedTensor(out, scale, "tensor")


@triton.jit
def _backward_kernel(
    da, x, scales, grad_scale, scale, amax, d8, d8_t, a8_t, rows, columns, groups,
    D: tl.constexpr, C: tl.constexpr, ACT: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, AMAX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    grad = tl.load(da + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    g = _load_half(x, scales, 0, row, column, group, inside, in_group, columns, groups, BM, BN, G, E8M0)
    u = _load_half(x, scales, 1, row, column, group, inside, in_group, columns, groups, BM, BN, G, E8M0)
    value, slope = _activate(g, ACT)
    dg = grad * u * slope
    du = grad * value
    if AMAX:
        atomic_amax(amax, dg)
        atomic_amax(amax, du)
    else:
        inverse = _inverse(grad_scale)
        dg8 = to_fp8(dg * inverse, D)
        du8 = to_fp8(du * inverse, D)
        a8 = to_fp8(value * u * _inverse(scale), C)
        at = row * (2 * columns) + column
        tl.store(d8 + at, dg8, mask=inside)
        tl.store(d8 + at + columns, du8, mask=inside)
        turned = tl.trans(column).to(tl.int64) * rows + tl.trans(row)
        down = columns.to(tl.int64) * rows
        here = tl.trans(inside)
        tl.store(d8_t + turned, tl.trans(dg8), mask=here)
        tl.store(d8_t + turned + down, tl.trans(du8), mask=here)
        tl.store(a8_t + turned, tl.trans(a8), mask=here)


def _backward(da, gate_up8, activation, grad_scale, scale, amax, outputs, grad_fmt, fmt, bm, bn) -> None:
    columns = da.shape[-1]
    flat = da.reshape(-1, columns).contiguous()
    rows, size = flat.shape[0], gate_up8.group_size
    with torch.cuda.device_of(da):
        _backward_kernel[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](
            flat, gate_up8.codes, gate_up8.scales, grad_scale, scale, amax, *outputs, rows, columns,
            triton.cdiv(columns, size), D=constants(grad_fmt, da), C=constants(fmt, da), ACT=activation, G=size,
            E8M0=gate_up8.scales.dtype == torch.uint8, AMAX=amax is not None, BM=bm, BN=bn, num_warps=4,
        )  # fmt: skip


def activation_grad_amax(da: torch.Tensor, gate_up8: QuantizedTensor, activation: str) -> torch.Tensor:
    """See :func:`coat_dist.reference.activation.activation_grad_amax`."""
    from ..formats import E4M3

    amax = amax_buffer(da.device)
    _backward(da, gate_up8, activation, None, None, amax, (None, None, None), E4M3, E4M3, 16, 128)
    return read_amax(amax)


def activation_backward(
    da: torch.Tensor,
    gate_up8: QuantizedTensor,
    activation: str,
    grad_fmt: FP8Format,
    grad_scale: torch.Tensor,
    fmt: FP8Format,
    scale: torch.Tensor,
) -> ActivationGradients:
    """See :func:`coat_dist.reference.activation.activation_backward`."""
    rows, columns = da.shape
    d8 = torch.empty(rows, 2 * columns, dtype=grad_fmt.dtype, device=da.device)
    d8_t = torch.empty(2 * columns, rows, dtype=grad_fmt.dtype, device=da.device)
    a8_t = torch.empty(columns, rows, dtype=fmt.dtype, device=da.device)
    _backward(da, gate_up8, activation, grad_scale, scale, None, (d8, d8_t, a8_t), grad_fmt, fmt, 32, 128)
    return ActivationGradients(
        QuantizedTensor(d8, grad_scale, "tensor"),
        QuantizedTensor(d8_t, grad_scale, "tensor"),
        QuantizedTensor(a8_t, scale, "tensor"),
    )
