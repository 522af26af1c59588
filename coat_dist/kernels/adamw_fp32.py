"""One AdamW step with fp32 moments in one launch for tensors of any size and alignment.

A model has hundreds of norms and biases of a few thousand elements, and a step is to cost less than
torch's fused one, which takes a launch for some hundred of them. The operations and their order are
those of ``adamw_fp32_step`` in ``reference/adamw.py``, with exact division and square root. On a
CPU, where the kernel would be interpreted, that definition does the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ..reference import adamw
from ..reference.adamw import AdamWStep, FP32Tensors
from ..reference.adamw_batch import Batch, written
from .adamw_numbers import (
    load_numbers,
    next_moments,
    numbers_of_counts,
    step_constants,
    step_scalars,
)
from .launch import cdiv, fast_launch
from .master import load_master, store_master
from .table import ALIGNMENT, Kind, Member, launches

TILE_ELEMENTS = 1024
NUM_WARPS = 4


@fast_launch
@triton.jit
def _adamw_fp32_kernel(
    table,
    grads,
    tensor_of_tile,
    of_counts,
    grad_factor,
    lr,
    decay,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    inverse_bias1,
    inverse_sqrt_bias2,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
):
    tile = tl.program_id(0)
    tensor = tl.load(tensor_of_tile + tile)
    row = table + tensor * 7
    if STEP.counted:
        _, inverse_bias1, inverse_sqrt_bias2, _ = load_numbers(of_counts + tensor * 4)
    first = (tile - tl.load(row)) * TILE
    param = tl.load(row + 1).to(tl.pointer_type(KIND.param))
    first_moment = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    second_moment = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    grad = tl.load(grads + tensor).to(tl.pointer_type(KIND.grad))
    n = tl.load(row + 4)
    low = tl.load(row + 5).to(tl.pointer_type(tl.int16))
    copy = tl.load(row + 6).to(tl.pointer_type(KIND.copy))
    if KIND.aligned:
        param = tl.multiple_of(param, 16)
        first_moment = tl.multiple_of(first_moment, 16)
        second_moment = tl.multiple_of(second_moment, 16)
        grad = tl.multiple_of(grad, 16)
        low = tl.multiple_of(low, 16)
        copy = tl.multiple_of(copy, 16)
        n = tl.multiple_of(n, 16)
    offset = tl.arange(0, TILE)
    inside = offset < tl.minimum(n - first, TILE).to(tl.int32)
    param += first
    first_moment += first
    second_moment += first
    grad += first

    p = load_master(param + offset, low + first + offset, inside, KIND.low)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first_moment + offset, mask=inside, other=0.0)
    v = tl.load(second_moment + offset, mask=inside, other=0.0)
    if STEP.lr_is_tensor:
        lr = tl.load(lr).to(tl.float32)
        decay = 1.0 - lr * weight_decay
    m, v = next_moments(g, m, v, grad_factor, beta1, rest1, beta2, rest2, STEP)
    p = p * decay - lr * tl.div_rn(m * inverse_bias1, tl.sqrt_rn(v) * inverse_sqrt_bias2 + eps)
    tl.store(first_moment + offset, m, mask=inside)
    tl.store(second_moment + offset, v, mask=inside)
    store_master(
        p,
        param + offset,
        low + first + offset,
        copy + first + offset,
        inside,
        KIND.low,
        KIND.copied,
    )


def _sort(tensors: Sequence[FP32Tensors]) -> tuple[dict[Kind, list[Member]], list[int]]:
    """All but empty ones, by kind. A row of the table, after its first tile: param, m, v, n,
    low, copy.
    """
    kinds: dict[Kind, list[Member]] = {}
    for i, one in enumerate(tensors):
        param, grad, m, v, low, copy, _ = one
        if n := param.numel():
            addresses = [t.data_ptr() for t in (param, m, v)]
            ends = [0 if t is None else t.data_ptr() for t in (low, copy)]
            aligned = not any(x % ALIGNMENT for x in (*addresses, *ends, n, grad.data_ptr()))
            kind = Kind.of(one, False, aligned)
            kinds.setdefault(kind, []).append(
                Member(i, cdiv(n, TILE_ELEMENTS), [*addresses, n, *ends])
            )
    return kinds, []


def step_contiguous(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """:func:`coat_dist.reference.adamw.adamw_fp32_steps` where all tensors are contiguous."""
    found = launches(tensors, _sort)
    if found.table is None:
        return
    grads, counted = found.grads(tensors), tensors[0].step_count is not None
    of_counts = (
        numbers_of_counts([tensors[i].step_count for i in found.order], numbers)
        if counted
        else grads
    )
    scalars, constants = step_scalars(numbers, grads), step_constants(numbers, counted)
    for kind, tensor_of_tile in zip(found.kinds, found.table.tensor_of_tile, strict=True):
        _adamw_fp32_kernel[(len(tensor_of_tile),)](
            found.table.table,
            grads,
            tensor_of_tile,
            of_counts,
            *scalars,
            TILE=TILE_ELEMENTS,
            STEP=constants,
            KIND=kind,
            # The compiler would contract other additions in each variant, and remainders lose the
            # bits of fp32 masters.
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def adamw_fp32_steps(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_fp32_steps`."""
    first = tensors.params[0] if isinstance(tensors, Batch) else tensors[0].param
    if not first.is_cuda:
        adamw.adamw_fp32_steps(tensors, numbers)
        return
    if isinstance(tensors, Batch) or _all_contiguous(tensors):
        step_contiguous(tensors, numbers)
    else:
        _by_way_of_contiguous(tensors, numbers)
    increment_version(written(tensors))  # kernels write by address, which torch does not see


def _all_contiguous(tensors: Sequence[FP32Tensors]) -> bool:
    return all(t.is_contiguous() for one in tensors for t in one if t is not None)


def _by_way_of_contiguous(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """With contiguous copies of what is not."""
    copies = [
        one._replace(**{k: getattr(one, k).contiguous() for k in FP32Tensors._fields[:4]})
        for one in tensors
    ]
    step_contiguous(copies, numbers)
    for one, dense in zip(tensors, copies, strict=True):
        for target, source in zip((one.param, *one[2:4]), (dense.param, *dense[2:4]), strict=True):
            if source is not target:
                target.copy_(source)
