"""FP8 products of all experts at once: torch's grouped scaled products where there are some, one product an expert
elsewhere.

Torch's (2.11 to 2.13) run on compute capability 9.0. They take two E4M3 operands with row scales and give BF16. What
they do not take (E5M2, fp32 results, other GPUs) goes through :func:`~coat_dist.ops.gemm.scaled_mm`, expert by expert,
for which the host has to know the rows of each (:attr:`~coat_dist.reference.grouped.ExpertRows.known`).
"""

from __future__ import annotations

import functools

import torch

from ..devices import has_fp8
from ..formats import QuantizedTensor
from ..reference import grouped as reference
from ..reference.grouped import BLOCK, ExpertRows
from .dispatch import use_kernels
from .gemm import scaled_mm

__all__ = ["grouped_mm", "grouped_wgrad"]

_ALIGNMENT = 16
"""Of all sizes, in bytes."""


def grouped_mm(
    a: QuantizedTensor, b: QuantizedTensor, rows: ExpertRows, out_dtype: torch.dtype, fast_accum: bool = False
) -> torch.Tensor:
    """As :func:`coat_dist.reference.grouped.grouped_mm`; sums as :func:`coat_dist.ops.scaled_mm` says."""
    if not (a.codes.is_cuda and use_kernels(a.codes)):
        return reference.grouped_mm(a, b, rows, out_dtype, fast_accum)
    total, (experts, n, k) = a.codes.shape[0], b.codes.shape
    if _grouped(a, b, out_dtype) and not (n % _ALIGNMENT or k % _ALIGNMENT):
        if a.layout == "row":
            a_scales, b_scales = a.scales.view(total), b.scales.view(experts, n)
        else:
            a_scales = a.scales[rows.blocks].repeat_interleave(BLOCK)
            b_scales = b.scales[:, None].expand(experts, n).contiguous()
        return torch._scaled_grouped_mm(
            a.codes, b.codes.transpose(1, 2), a_scales, b_scales, offs=rows.ends, out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )  # fmt: skip
    out = torch.empty(total, n, dtype=out_dtype, device=a.codes.device)
    for expert, at in rows.pieces():
        scales, layout = (a.scales[at], "row") if a.layout == "row" else (a.scales[expert], "tensor")
        left = QuantizedTensor(a.codes[at], scales, layout)
        out[at] = scaled_mm(left, QuantizedTensor(b.codes[expert], b.scales[expert], layout), out_dtype, fast_accum)
    return out


def grouped_wgrad(a: QuantizedTensor, b: QuantizedTensor, rows: ExpertRows, out_dtype: torch.dtype) -> torch.Tensor:
    """As :func:`coat_dist.reference.grouped.grouped_wgrad`."""
    if not (a.codes.is_cuda and use_kernels(a.codes)):
        return reference.grouped_wgrad(a, b, rows, out_dtype)
    m, n = a.codes.shape[0], b.codes.shape[0]
    if _grouped(a, b, out_dtype) and n % _ALIGNMENT == 0:
        a_scales, b_scales = (q.scales.repeat_interleave(q.codes.shape[0]) for q in (a, b))
        return torch._scaled_grouped_mm(
            a.codes, b.codes.t(), a_scales, b_scales, offs=rows.ends, out_dtype=out_dtype, use_fast_accum=False
        )
    out = torch.zeros(rows.experts, m, n, dtype=out_dtype, device=a.codes.device)
    for expert, at in rows.pieces():
        left, right = (QuantizedTensor(q.codes[:, at].contiguous(), q.scales[expert], "tensor") for q in (a, b))
        out[expert] = scaled_mm(left, right, out_dtype)
    return out


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
    return torch.cuda.get_device_capability(device) == (9, 0) and hasattr(torch, "_scaled_grouped_mm")
