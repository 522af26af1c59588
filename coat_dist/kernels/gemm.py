"""FP8 products on a GPU: by FP8 tensor cores where it has them, by BF16 ones where it runs kernels
but has none. There are no Triton kernels here: cuBLASLt and CUTLASS are called through torch.

**Products of all experts** are one grouped product of torch, or one product an expert, whichever is
there and faster. Torch's grouped scaled products (2.11 to 2.13) run on compute capability 9.0. They
take two E4M3 operands with row scales and give BF16. What they do not take (E5M2, fp32 results,
other GPUs) goes through ``torch._scaled_mm`` or :func:`scaled_mm`, expert by expert, for which the
host has to know the rows of each (:attr:`~coat_dist.reference.grouped.ExpertRows.known`). Where it
does, and experts have many rows, all products go that way: cuBLASLt's product of one expert is then
the faster one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..devices import has_fp8
from ..formats import QuantizedTensor
from ..reference import gemm as reference
from ..reference.gemm import check_operands
from ..reference.grouped import BLOCK, ExpertRows

_ALIGNMENT = 16
"""cuBLASLt takes FP8 operands whose k and n are multiples of 16. Zero codes fill up others
without changing a sum.
"""
MUCH_WORK = 2**35
"""Multiplications of one expert's product from which on experts are multiplied one by one where the
host knows their rows. TFLOP/s of forward, dgrad, wgrad on an H200, one by one and grouped: 8
experts of 4096 x 28672 with 4096 rows each 1344, 1303, 1080 and 1179, 1000, 875; with 1024 rows
each 1345, 1291, 868 and 915, 997, 600. 128 experts of 2048 x 1536 with 1024 rows each are bound by
the host one by one: 245, 296, 273 and 1060, 989, 737.
"""
FEW_TERMS = 2048
"""Sums of at most so many products stay in the tensor cores' shorter accumulators in a grouped
product, in backward too: torch's kernel for the longer ones takes three times as long with those
128 experts. wgrad's sums have as many terms as an expert has tokens, which the host need not know:
half as many on the average, so that an expert may have twice its share, and where the host knows,
twice as many at most. Relative errors against exact sums, 2048 terms, with BF16's own 1.7e-3: of
terms of either sign 1.9e-3 in place of 1.7e-3 (16 384 terms: 3.5e-3); where all have one sign the
sum comes out 3 % too small, as it does in forward (1024 terms: 1.3 %; 4096: 6.5 %; 16 384: 23 %).
"""


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`coat_dist.reference.gemm.scaled_mm`.

    On a GPU sums are fp32. ``fast_accum`` leaves them in the tensor cores' shorter accumulators: 2
    to 10 % faster, good for forward; dgrad and wgrad sum small terms over many tokens and do not
    use it.

    A GPU without FP8 tensor cores multiplies codes as BF16 numbers, whose products of codes are
    exact: the time of a BF16 product, and of passes that convert both operands and scale the sums.
    """
    if not a.codes.is_cuda:
        return reference.scaled_mm(a, b, out_dtype, fast_accum, out)
    check_operands(a, b)
    even = a.codes.shape[1] % _ALIGNMENT == 0 and b.codes.shape[0] % _ALIGNMENT == 0
    direct = out is not None and even and out.storage_offset() * out.itemsize % _ALIGNMENT == 0
    result = _scaled_mm(a, b, out_dtype, fast_accum, out if direct else None)
    return result if out is None or result is out else out.copy_(result)


def _scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The product, in ``out`` where one call can write it there."""
    n, k = b.codes.shape
    if not (a.codes.numel() and n):  # an expert without tokens: a sum over none is zero
        return a.codes.new_zeros(a.codes.shape[0], n, dtype=out_dtype)
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2 or not has_fp8(a.codes):
        # BF16 holds all codes exactly: for two E5M2 tensors, of which no hardware has a product,
        # and for old GPUs.
        sums = torch.mm(a.codes.bfloat16(), b.codes.bfloat16().t(), out_dtype=torch.float32)
        return _apply_scales(sums, a, b, out_dtype)
    n_fill, k_fill = -n % _ALIGNMENT, -k % _ALIGNMENT
    left, right = _fill(a.codes, 0, k_fill), _fill(b.codes, n_fill, k_fill).t()
    if a.layout == "row" and not (out_dtype == torch.bfloat16 and a.codes.dtype == b.codes.dtype):
        # Kernels of row scales write BF16, of two E4M3 tensors; only newer ones on some devices
        # also write fp32.
        one = a.scales.new_ones(())
        sums = torch._scaled_mm(
            left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast_accum
        )
        return _apply_scales(sums[:, :n], a, b, out_dtype)
    b_scales = b.scales
    if a.layout == "row":
        if n_fill:
            b_scales = torch.nn.functional.pad(b_scales, (0, 0, 0, n_fill))
        b_scales = b_scales.t()
    given = {} if out is None else {"out": out}
    result = torch._scaled_mm(
        left, right, a.scales, b_scales, out_dtype=out_dtype, use_fast_accum=fast_accum, **given
    )
    return result[:, :n].contiguous() if n_fill else result


def _apply_scales(
    sums: torch.Tensor, a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype
) -> torch.Tensor:
    """fp32 sums ``[m, n]`` times both scales."""
    if a.layout == "tensor":
        return (sums * (a.scales * b.scales)).to(dtype)
    return (sums * a.scales).mul_(b.scales.t()).to(dtype)


def _fill(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero codes added below and to the right."""
    if not rows and not columns:
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def grouped_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    rows: ExpertRows,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> torch.Tensor:
    """As :func:`coat_dist.reference.gemm.grouped_mm`; sums as :func:`scaled_mm` says."""
    if not a.codes.is_cuda:
        return reference.grouped_mm(a, b, rows, out_dtype, fast_accum)
    total, (experts, n, k) = a.codes.shape[0], b.codes.shape
    aligned = not (n % _ALIGNMENT or k % _ALIGNMENT)
    if aligned and not _by_expert(rows, n * k) and _grouped(a, b, out_dtype):
        if a.layout == "row":
            a_scales, b_scales = a.scales.view(total), b.scales.view(experts, n)
        else:
            a_scales, b_scales = _spread(a.scales, b.scales, 1, n, rows)
            b_scales = b_scales.view(experts, n)
        return torch._scaled_grouped_mm(
            a.codes,
            b.codes.transpose(1, 2),
            a_scales,
            b_scales,
            offs=rows.ends,
            out_dtype=out_dtype,
            use_fast_accum=fast_accum or k <= FEW_TERMS,
        )
    out = a.codes.new_empty(total, n, dtype=out_dtype)
    direct, by_row = aligned and _direct(a, b, out_dtype), a.layout == "row"
    a_scales, b_scales = (q.scales if by_row else apart(q.scales) for q in (a, b))
    for expert, at in rows.pieces():
        left = QuantizedTensor(
            a.codes[at], a_scales[at if by_row else expert], "row" if by_row else "tensor"
        )
        right = QuantizedTensor(b.codes[expert], b_scales[expert], left.layout)
        _product(left, right, out[at], direct, fast_accum)
    return out


def grouped_wgrad(
    a: QuantizedTensor, b: QuantizedTensor, rows: ExpertRows, out_dtype: torch.dtype
) -> torch.Tensor:
    """As :func:`coat_dist.reference.gemm.grouped_wgrad`."""
    if not a.codes.is_cuda:
        return reference.grouped_wgrad(a, b, rows, out_dtype)
    m, n = a.codes.shape[0], b.codes.shape[0]
    aligned = n % _ALIGNMENT == 0
    if aligned and not _by_expert(rows, m * n) and _grouped(a, b, out_dtype):
        a_scales, b_scales = _spread(a.scales, b.scales, m, n)
        few = _few_tokens(rows, a.codes.shape[1])
        return torch._scaled_grouped_mm(
            a.codes,
            b.codes.t(),
            a_scales,
            b_scales,
            offs=rows.ends,
            out_dtype=out_dtype,
            use_fast_accum=few,
        )
    out = a.codes.new_empty(rows.experts, m, n, dtype=out_dtype)
    direct, missing = aligned and _direct(a, b, out_dtype), set(range(rows.experts))
    scales = apart(a.scales), apart(b.scales)
    for expert, at in rows.pieces():
        missing.remove(expert)
        left, right = (
            QuantizedTensor(q.codes[:, at], s[expert], "tensor")
            for q, s in zip((a, b), scales, strict=True)
        )
        _product(left, right, out[expert], direct, False)
    for expert in missing:
        out[expert].zero_()
    return out


def _product(
    left: QuantizedTensor, right: QuantizedTensor, out: torch.Tensor, direct: bool, fast_accum: bool
) -> None:
    """``left @ right.T`` into ``out``, written there by the product itself where that is
    possible.
    """
    if not direct:
        left, right = (
            QuantizedTensor(q.codes.contiguous(), q.scales, q.layout) for q in (left, right)
        )
        out.copy_(scaled_mm(left, right, out.dtype, fast_accum))
        return
    scales = right.scales.t() if right.layout == "row" else right.scales
    torch._scaled_mm(
        left.codes,
        right.codes.t(),
        left.scales,
        scales,
        out_dtype=out.dtype,
        use_fast_accum=fast_accum,
        out=out,
    )


def apart(scales: torch.Tensor) -> torch.Tensor:
    """Scales of experts, fp32 ``[experts]``, 16 bytes apart: cuBLASLt takes no other addresses
    of scales.
    """
    return scales[:, None].expand(-1, 4).contiguous()[:, 0]


def one_by_one(rows: int, experts: int, weight: int) -> bool:
    """Whether products of so many rows with matrices of ``weight`` elements are faster expert by
    expert, for which the host has to know whose rows they are.
    """
    return rows * weight >= MUCH_WORK * experts


def _spread(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from .grouped import spread_scales  # needs triton, which a machine without a GPU may lack

    return spread_scales(*given)


def _by_expert(rows: ExpertRows, weight: int) -> bool:
    """Whether one product an expert is the faster way, and does not wait for the GPU."""
    return rows.known is not None and one_by_one(rows.known[-1], len(rows.known), weight)


def _few_tokens(rows: ExpertRows, total: int) -> bool:
    """Whether sums over an expert's rows are short: see :data:`FEW_TERMS`. Rows that fill up
    blocks do not count.
    """
    if total > (FEW_TERMS // 2 + BLOCK) * rows.experts:
        return False
    return rows.known is None or max(at.stop - at.start for _, at in rows.pieces()) <= 2 * FEW_TERMS


def _direct(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> bool:
    """Whether ``torch._scaled_mm`` takes operands as they are (see :func:`scaled_mm`)."""
    e4m3 = a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn
    two_e5m2 = a.codes.dtype == b.codes.dtype == torch.float8_e5m2
    kernel = (e4m3 and out_dtype == torch.bfloat16) if a.layout == "row" else not two_e5m2
    return kernel and has_fp8(a.codes)


def _grouped(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> bool:
    """Whether torch has the product."""
    return (
        out_dtype == torch.bfloat16
        and a.codes.dtype == b.codes.dtype == torch.float8_e4m3fn
        and has_fp8(a.codes)
        and _is_hopper(a.codes.get_device())
    )


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0) and hasattr(
        torch, "_scaled_grouped_mm"
    )
