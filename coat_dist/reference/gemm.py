"""Matrix products of FP8 tensors, and of all experts side by side.

``a`` is ``[m, k]``, ``b`` is ``[n, k]``, both contiguous, and the product is ``a @ b.T``: the one
arrangement that Hopper's FP8 tensor cores take, so it is the only one here. Both have one scale, or
both one a row: a scale must be constant along k to be applied to a sum.

The definition is exact. A product of two E4M3 codes is a multiple of 2**-18 below 2**18, so fp64
sums of up to 2**17 of them lose nothing, in any order. Summing parts of k on several ranks, then
scaling and rounding once, therefore gives the same bits as one rank would. (Codes of E5M2 spread
wider: there fp64 sums can differ in their last bit, which survives rounding to fp32 about once in
2**29.)
"""

from __future__ import annotations

import torch

from ..formats import QuantizedTensor
from .grouped import ExpertRows

_CHUNK = 2**24
"""Elements converted to fp64 at a time: 128 MiB."""


def exact_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` summed in fp64; a ``[m, k]``, b ``[n, k]``, any floating dtype; returns fp64
    ``[m, n]``.
    """
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty(m, n, dtype=torch.float64)
    step = max(1, _CHUNK // max(k, 1))
    for row in range(0, m, step):
        rows = a[row : row + step].double()
        for column in range(0, n, step):
            columns = b[column : column + step].double()
            out[row : row + step, column : column + step] = rows @ columns.t()
    return out


def check_operands(a: QuantizedTensor, b: QuantizedTensor) -> None:
    """Whether two tensors can be multiplied.

    Raises:
        ValueError: an operand is no matrix with one scale or with one a row, the two differ in
            that, or the shapes do not fit.
    """
    for name, q in (("a", a), ("b", b)):
        if q.layout not in ("tensor", "row") or q.codes.dim() != 2:
            raise ValueError(
                f"{name}: got layout {q.layout!r} of shape {list(q.codes.shape)}, "
                "accepted: layout 'tensor' or 'row', 2-D"
            )
    if a.layout != b.layout:
        raise ValueError(f"b: got layout {b.layout!r}, accepted: {a.layout!r}, as a has")
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"b: got shape {list(b.codes.shape)}, accepted: [n, {a.codes.shape[1]}] to fit a"
        )


def code_products(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    """Sums of products of codes, fp64 ``[m, n]``, scales left out.

    Raises:
        ValueError: see :func:`check_operands`.
    """
    check_operands(a, b)
    return exact_mm(a.codes, b.codes)


def scale_and_round(
    sums: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sums of products (fp64 ``[m, n]``) times both scales, whose own product fp64 holds; rounded
    to fp32, then to ``dtype``. Scales are scalars, or ``[m, 1]`` and ``[n, 1]``.
    """
    return (sums * (a_scale.double() * b_scale.double().t())).float().to(dtype)


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b.T`` with the scales applied, ``[m, n]`` of ``out_dtype`` (fp32 or a 16-bit float).

    Args:
        fast_accum: allow an implementation to keep fewer bits in its running sums; the definition
            does not.
        out: contiguous ``[m, n]`` of ``out_dtype`` that takes the result.

    Raises:
        ValueError: see :func:`check_operands`.
    """
    result = scale_and_round(code_products(a, b), a.scales, b.scales, out_dtype)
    return result if out is None else out.copy_(result)


def grouped_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    rows: ExpertRows,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Each expert's rows of ``a`` times its matrix transposed, as :func:`scaled_mm`.

    Args:
        a: codes ``[total, k]``, layout "row" or "expert".
        b: codes ``[experts, n, k]``, the same layout: scales ``[experts, n, 1]`` or ``[experts]``.

    Returns:
        ``[total, n]`` of ``out_dtype``.
    """
    out = a.codes.new_zeros(a.codes.shape[0], b.codes.shape[1], dtype=out_dtype)
    for expert, at in rows.pieces():
        if a.layout == "row":
            left = QuantizedTensor(a.codes[at], a.scales[at], "row")
        else:
            left = QuantizedTensor(a.codes[at], a.scales[expert], "tensor")
        right = QuantizedTensor(b.codes[expert], b.scales[expert], left.layout)
        out[at] = scaled_mm(left, right, out_dtype, fast_accum)
    return out


def grouped_wgrad(
    a: QuantizedTensor, b: QuantizedTensor, rows: ExpertRows, out_dtype: torch.dtype
) -> torch.Tensor:
    """For each expert the product, over its rows, of ``a`` and ``b`` transposed; zero without rows.

    Args:
        a, b: codes ``[m, total]`` and ``[n, total]``, layout "expert".

    Returns:
        ``[experts, m, n]`` of ``out_dtype``.
    """
    out = a.codes.new_zeros(rows.experts, a.codes.shape[0], b.codes.shape[0], dtype=out_dtype)
    for expert, at in rows.pieces():
        left, right = (QuantizedTensor(q.codes[:, at], q.scales[expert], "tensor") for q in (a, b))
        out[expert] = scaled_mm(left, right, out_dtype)
    return out
