"""Activation kernels: the functions of ``reference/activation.py``.

The pre-activation is one tensor, [rows, parts, f]: with a gate (GATED) gate and up, of which a program takes the same
tile, otherwise one part. Backward's second pass reads da and all parts once and writes their gradients, the same
transposed, and the activation transposed: no intermediate of size f is ever written in BF16. fc1's bias (BIAS) costs
no pass of its own: it is added as pre is read, and its gradient is summed by columns of each tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import E4M3, FP8Format, QuantizedTensor
from ..reference import activation as reference
from ..reference.activation import ACTIVATIONS, ActivationForward, ActivationGradients
from .fp8 import amax_buffer, atomic_amax, constants, group_decode, group_encode, parts, read_amax, to_fp8

__all__ = ["activation_backward", "activation_compress", "activation_grad_amax", "activation_quantize"]


@triton.jit
def _activate(g, ACT: tl.constexpr):
    """Value and derivative of the function called ACT."""
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(-g))
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * g * (1.0 + 0.044715 * g * g)
        t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        value = 0.5 * g * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * (0.7978845608028654 * (1.0 + 0.134145 * g * g))
    elif ACT == "quick_gelu":
        s = 1.0 / (1.0 + tl.exp(-1.702 * g))
        value = g * s
        slope = s * (1.0 + 1.702 * g * (1.0 - s))
    else:
        tl.static_assert(ACT == "squared_relu")
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
        slope = 2.0 * r
    return value, slope


@triton.jit
def _load_part(
    x, scales, bias, part, row, column, group, inside, in_group, columns, groups,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """A tile of the gate (part 0) or of up (part 1), fp32, from plain values (G = 0) or from per-group codes."""
    value = tl.load(x + (row * PARTS + part) * columns + column, mask=inside, other=0.0)
    if G == 0:
        out = value.to(tl.float32)
        if BIAS:  # zero outside, where an amax would see it
            out = tl.where(inside, out + _load_bias(bias, part, column, columns), 0.0)
    else:
        stored = tl.load(scales + (row * PARTS + part) * groups + group, mask=in_group, other=0)
        out = group_decode(value, stored, BM, BN, G, E8M0)
    return out


@triton.jit
def _load_bias(bias, part, column, columns):
    return tl.load(bias + part * columns + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _compress_part(
    x, bias, codes, scales, part, row, column, group, inside, in_group, columns, groups, C: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    value = _load_part(
        x, None, bias, part, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, 0, E8M0
    )
    q, stored = group_encode(value, BM, BN, G, E8M0, C)
    tl.store(codes + (row * PARTS + part) * columns + column, q, mask=inside)
    tl.store(scales + (row * PARTS + part) * groups + group, stored, mask=in_group)
    return value


@triton.jit
def _compress_kernel(
    x, bias, codes, scales, amax, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    g = _compress_part(
        x, bias, codes, scales, 0, row, column, group, inside, in_group, columns, groups, C, PARTS, BIAS, BM, BN, G,
        E8M0,
    )  # fmt: skip
    value, _ = _activate(g, ACT)
    if GATED:
        value *= _compress_part(
            x, bias, codes, scales, 1, row, column, group, inside, in_group, columns, groups, C, PARTS, BIAS, BM, BN, G,
            E8M0,
        )  # fmt: skip
    atomic_amax(amax, value)


def activation_compress(
    pre: torch.Tensor,
    activation: str,
    fmt: FP8Format,
    group_size: int,
    scale: str,
    exact: bool,
    bias: torch.Tensor | None = None,
) -> ActivationForward:
    """See :func:`coat_dist.reference.activation.activation_compress`; with ``exact`` only, see ``kernels/norm.py``."""
    if not exact:
        return reference.activation_compress(pre, activation, fmt, group_size, scale, exact, bias)
    act = ACTIVATIONS[activation]
    columns = pre.shape[-1] // act.parts
    flat = pre.reshape(-1, pre.shape[-1]).contiguous()
    groups, e8m0, device = triton.cdiv(columns, group_size), scale == "e8m0", pre.device
    shape = (*pre.shape[:-1], act.parts)
    codes = torch.empty(*shape, columns, dtype=fmt.dtype, device=device)
    scales = torch.empty(*shape, groups, dtype=torch.uint8 if e8m0 else torch.bfloat16, device=device)
    amax = amax_buffer(device)
    bm, bn = 16, 128
    with torch.cuda.device_of(pre):
        _compress_kernel[(triton.cdiv(flat.shape[0], bm), triton.cdiv(columns, bn))](
            flat, bias, codes, scales, amax, flat.shape[0], columns, groups, C=constants(fmt, pre), ACT=act.function,
            GATED=act.gated, BIAS=bias is not None, G=group_size, E8M0=e8m0, BM=bm, BN=bn, num_warps=4,
        )  # fmt: skip
    return ActivationForward(QuantizedTensor(codes, scales, "group", group_size), read_amax(amax))


@triton.jit
def _quantize_kernel(
    x, scales, bias, scale, out, rows, columns, groups, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, G: tl.constexpr, E8M0: tl.constexpr, TRANSPOSE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * BG + tl.arange(0, BG))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    g = _load_part(
        x, scales, bias, 0, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, G, E8M0
    )  # fmt: skip
    value, _ = _activate(g, ACT)
    if GATED:
        value *= _load_part(
            x, scales, bias, 1, row, column, group, inside, in_group, columns, groups, PARTS, BIAS, BM, BN, G, E8M0
        )  # fmt: skip
    q = to_fp8(value * _inverse(scale), C)
    if TRANSPOSE:
        tl.store(out + tl.trans(column).to(tl.int64) * rows + tl.trans(row), tl.trans(q), mask=tl.trans(inside))
    else:
        tl.store(out + row * columns + column, q, mask=inside)


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full((1, 1), 1.0, tl.float32), tl.load(scale) + tl.zeros((1, 1), tl.float32))


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
    bm, bn = (64, 64) if transpose else (16, 256)
    with torch.cuda.device_of(source):
        _quantize_kernel[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](
            flat, scales, bias, scale, out, rows, columns, triton.cdiv(columns, size) if size else 0,
            C=constants(fmt, source), ACT=act.function, GATED=act.gated, BIAS=bias is not None, G=size, E8M0=e8m0,
            TRANSPOSE=transpose, BM=bm, BN=bn, BG=bn // size if size else 1, num_warps=4,
        )  # fmt: skip
    return QuantizedTensor(out, scale, "tensor")


@triton.jit
def _backward_kernel(
    da, x, scales, grad_scale, scale, amax, d8, d8_t, a8_t, dbias, rows, columns, groups,
    D: tl.constexpr, C: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, G: tl.constexpr,
    E8M0: tl.constexpr, AMAX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    group = (tl.program_id(1) * (BN // G) + tl.arange(0, BN // G))[None, :]
    inside = (row < rows) & (column < columns)
    in_group = (row < rows) & (group < groups)
    grad = tl.load(da + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    g = _load_part(
        x, scales, None, 0, row, column, group, inside, in_group, columns, groups, PARTS, False, BM, BN, G, E8M0
    )  # fmt: skip
    value, slope = _activate(g, ACT)
    if GATED:
        u = _load_part(
            x, scales, None, 1, row, column, group, inside, in_group, columns, groups, PARTS, False, BM, BN, G, E8M0
        )  # fmt: skip
        dg = grad * u * slope
        du = grad * value
        value *= u
    else:
        dg = grad * slope
    if AMAX:
        atomic_amax(amax, dg)
        if GATED:
            atomic_amax(amax, du)
    else:
        _store_gradient(
            dg, grad_scale, d8, d8_t, dbias, 0, row, column, inside, rows, columns, D, PARTS, BIAS
        )  # fmt: skip
        if GATED:
            _store_gradient(
                du, grad_scale, d8, d8_t, dbias, 1, row, column, inside, rows, columns, D, PARTS, BIAS
            )  # fmt: skip
        a8 = to_fp8(value * _inverse(scale), C)
        turned = tl.trans(column).to(tl.int64) * rows + tl.trans(row)
        tl.store(a8_t + turned, tl.trans(a8), mask=tl.trans(inside))


@triton.jit
def _store_gradient(
    d, grad_scale, d8, d8_t, dbias, part, row, column, inside, rows, columns, D: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of the gradient, as it is and transposed; with BIAS also the sums of its columns."""
    q = to_fp8(d * _inverse(grad_scale), D)
    tl.store(d8 + (row * PARTS + part) * columns + column, q, mask=inside)
    turned = (tl.trans(column).to(tl.int64) + part * columns) * rows + tl.trans(row)
    tl.store(d8_t + turned, tl.trans(q), mask=tl.trans(inside))
    if BIAS:
        at = (tl.program_id(0).to(tl.int64) * PARTS + part) * columns + column
        tl.store(dbias + at, tl.sum(d, 0)[None, :], mask=column < columns)


def _backward(da, pre8, activation, grad_scale, scale, amax, outputs, grad_fmt, fmt, bm, bn) -> None:
    act, columns = ACTIVATIONS[activation], da.shape[-1]
    flat = da.reshape(-1, columns).contiguous()
    rows, size = flat.shape[0], pre8.group_size
    with torch.cuda.device_of(da):
        _backward_kernel[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](
            flat, pre8.codes, pre8.scales, grad_scale, scale, amax, *outputs, rows, columns,
            triton.cdiv(columns, size), D=constants(grad_fmt, da), C=constants(fmt, da), ACT=act.function,
            GATED=act.gated, BIAS=outputs[-1] is not None, G=size, E8M0=pre8.scales.dtype == torch.uint8,
            AMAX=amax is not None, BM=bm, BN=bn, num_warps=4,
        )  # fmt: skip


def activation_grad_amax(da: torch.Tensor, pre8: QuantizedTensor, activation: str) -> torch.Tensor:
    """See :func:`coat_dist.reference.activation.activation_grad_amax`."""
    amax = amax_buffer(da.device)
    _backward(da, pre8, activation, None, None, amax, (None,) * 4, E4M3, E4M3, 16, 128)
    return read_amax(amax)


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

    The bias's gradient: fp32 sums of each tile's 32 rows, then their sum in ``bias_sum``. In the same order every time.
    """
    (rows, columns), width, device = da.shape, da.shape[1] * ACTIVATIONS[activation].parts, da.device
    bm, bn = 32, 128
    d8 = torch.empty(rows, width, dtype=grad_fmt.dtype, device=device)
    d8_t = torch.empty(width, rows, dtype=grad_fmt.dtype, device=device)
    a8_t = torch.empty(columns, rows, dtype=fmt.dtype, device=device)
    sums = None if bias_sum is None else torch.empty(triton.cdiv(rows, bm), width, dtype=torch.float32, device=device)
    _backward(da, pre8, activation, grad_scale, scale, None, (d8, d8_t, a8_t, sums), grad_fmt, fmt, bm, bn)
    return ActivationGradients(
        QuantizedTensor(d8, grad_scale, "tensor"),
        QuantizedTensor(d8_t, grad_scale, "tensor"),
        QuantizedTensor(a8_t, scale, "tensor"),
        None if sums is None else sums.sum(0, dtype=bias_sum),
    )
