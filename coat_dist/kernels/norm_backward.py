"""The norm's backward kernel: the function of the same name in ``reference/norm.py``.

One pass reads dy, x (from codes) and the residual's gradient and writes dx. A program takes every
n-th row and keeps its part of the parameters' gradients in registers; these parts are summed at the
end, in the same order every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import QuantizedTensor
from ..reference.norm import NormStats
from .fp8 import dense
from .groups import decode_raw, load_raw, unpack
from .launch import cdiv, fast_launch, next_power_of_2
from .quantize import launch_rows

# Largest number of columns (the last row also serves more); programs, each of which sums a weight
# gradient of its rows; warps; registers a thread without and with a residual. Rows have to stay in
# registers, and two programs should fit a multiprocessor. Rows of 4096 take 131 us with 8 warps
# and 119 with 16; rows of 5120 take 600 us with 8.
BACKWARD = ((2048, 264, 8, (112, 128)), (4096, 264, 16, (64, 64)), (8192, 132, 16, (128, 128)))


@triton.jit
def _load_row(dy, x, scales, rstd, row, rows, column, group, columns, groups, G: tl.constexpr):
    """One row of dy and x as they lie in memory, and its rstd."""
    here = row < rows
    inside = here & (column < columns)
    value, stored = load_raw(
        x, scales, row, column, group, inside, here & (group < groups), columns, groups, G
    )
    grad = tl.load(dy + row * columns + column, mask=inside, other=0.0)
    return grad, value, stored, tl.load(rstd + row, mask=here, other=0.0)


# ``turns`` follows the number of tokens: as a constant, or as 1 or a multiple of 16, it would be
# compiled anew.
@fast_launch
@triton.jit(do_not_specialize=["turns"])
def _backward_kernel(
    dy,
    residual,
    x,
    scales,
    rstd,
    mean,
    weight,
    dx,
    dweight,
    dbias,
    rows,
    columns,
    groups,
    turns,
    G: tl.constexpr,
    S: tl.constexpr,
    CENTER: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    """CENTER: a LayerNorm; SHIFT: x has a mean to be taken off, codes have none."""
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BN)[None, :]
    group = tl.arange(0, BG)[None, :]
    inside = column < columns
    sum_weight = tl.zeros((1, BN), tl.float32)
    if BIAS:
        sum_bias = tl.zeros((1, BN), tl.float32)
    if WEIGHT:
        gain = tl.load(weight + column, mask=inside, other=0.0)
    row = first.to(tl.int64)
    raw_grad, raw, stored, reciprocal = _load_row(
        dy, x, scales, rstd, row, rows, column, group, columns, groups, G
    )
    for _ in range(turns):
        # The next row is on its way while this one is reduced: the reductions wait for all warps.
        ahead = row + step
        next_grad, next_raw, next_stored, next_reciprocal = _load_row(
            dy, x, scales, rstd, ahead, rows, column, group, columns, groups, G
        )
        here = inside & (row < rows)
        # The residual of this row arrives during the reductions. Loaded a row ahead, it would not
        # fit into registers.
        if RESIDUAL:
            carried = tl.load(residual + row * columns + column, mask=here, other=0.0)
        value = decode_raw(raw, stored, 1, BN, G, S)
        if SHIFT:
            value = tl.where(here, value - tl.load(mean + row, mask=row < rows, other=0.0), 0.0)
        normalized = value * reciprocal
        grad = raw_grad.to(tl.float32)
        weighted = grad
        if WEIGHT:
            weighted = grad * gain.to(tl.float32)
        out = weighted - normalized * (tl.sum(weighted * normalized, 1) / columns)[:, None]
        if CENTER:
            out = out - (tl.sum(weighted, 1) / columns)[:, None]
        if BIAS:
            sum_bias += grad
        sum_weight += grad * normalized
        out = out * reciprocal
        if RESIDUAL:
            out = out + carried.to(tl.float32)
        tl.store(dx + row * columns + column, out.to(dx.dtype.element_ty), mask=here)
        row, raw_grad, raw, stored, reciprocal = (
            ahead,
            next_grad,
            next_raw,
            next_stored,
            next_reciprocal,
        )
    at = first.to(tl.int64) * columns + column
    tl.store(dweight + at, sum_weight, mask=inside)
    if BIAS:
        tl.store(dbias + at, sum_bias, mask=inside)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor | QuantizedTensor,
    kind: str,
    stats: NormStats,
    weight: torch.Tensor | None,
    sum_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`coat_dist.reference.norm.norm_backward`."""
    source, scales, size, form = unpack(x)
    source = launch_rows(source)
    rows, columns = source.shape
    dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    _, programs, warps, registers = next(
        (choice for choice in BACKWARD if columns <= choice[0]), BACKWARD[-1]
    )
    programs = max(1, min(rows, programs))  # without rows one that writes zero sums
    mean = stats.mean if scales is None else None
    carried = None if residual is None else launch_rows(residual)
    partial = torch.empty(1 + bias, programs, columns, dtype=torch.float32, device=dy.device)
    width = max(next_power_of_2(columns), size)
    _backward_kernel[(programs,)](
        launch_rows(dy),
        carried,
        source,
        scales,
        stats.rstd,
        mean,
        dense(weight),
        dx,
        partial,
        partial[1] if bias else None,
        rows,
        columns,
        cdiv(columns, size) if size else 0,
        cdiv(rows, programs),
        G=size,
        S=form,
        CENTER=kind == "layernorm",
        SHIFT=mean is not None,
        WEIGHT=weight is not None,
        BIAS=bias,
        RESIDUAL=carried is not None,
        BN=width,
        BG=width // size if size else 1,
        num_warps=warps,
        maxnreg=registers[residual is not None],
    )
    sums = partial.sum(1, dtype=sum_dtype)
    return dx, sums[0], sums[1] if bias else None
