"""FP8 matrix products: FP8 tensor cores on a GPU that has them, BF16 ones on a GPU that runs
kernels but has none, the definition of ``reference/gemm.py`` elsewhere.
"""

from __future__ import annotations

import torch

from ..devices import has_fp8
from ..formats import QuantizedTensor
from ..reference import gemm as reference
from ..reference.gemm import check_operands
from .dispatch import use_kernels

__all__ = ["scaled_mm"]

_ALIGNMENT = 16
"""cuBLASLt takes FP8 operands whose k and n are multiples of 16. Zero codes fill up others
without changing a sum.
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
    if not (a.codes.is_cuda and use_kernels(a.codes)):
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
        b_scales = (
            torch.nn.functional.pad(b_scales, (0, 0, 0, n_fill)).t() if n_fill else b_scales.t()
        )
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
