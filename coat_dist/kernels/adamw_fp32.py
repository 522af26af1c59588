"""One AdamW step with fp32 moments on many tensors: one launch on a GPU, few calls on a CPU.

On a GPU the work is done by ``adamw_fp32_kernel.py``. On a CPU, where kernels are interpreted,
torch's ``_foreach`` operations take lists of tensors; the operations and their order are those of
``adamw_fp32_steps`` in ``reference/adamw.py``, so results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from ..reference.adamw import AdamWStep, FP32Tensors, counted
from ..reference.adamw_batch import Batch, written
from ..reference.master import join, split
from .adamw_fp32_kernel import step_contiguous

__all__ = ["adamw_fp32_steps"]

BATCH_ELEMENTS = 1 << 22
"""Tensors are taken together up to this many elements: temporaries take up to 16 bytes for each."""


def adamw_fp32_steps(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """See :func:`coat_dist.reference.adamw.adamw_fp32_steps`."""
    if isinstance(tensors, Batch):
        on_gpu, dense = tensors.params[0].is_cuda, True
    else:
        on_gpu = tensors[0].param.is_cuda
        dense = on_gpu and all(t.is_contiguous() for one in tensors for t in one if t is not None)
    if on_gpu and dense:
        step_contiguous(tensors, numbers)
    elif on_gpu:
        _by_way_of_contiguous(tensors, numbers)
    else:
        _step_in_batches(tensors, numbers)
    if on_gpu:  # kernels write by address, which torch does not see
        increment_version(written(tensors))


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


def _step_in_batches(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    for batch in _batches(tensors):
        *given, low, copies, counts = (list(column) for column in zip(*batch, strict=True))
        params, grads, m, v = ([t.contiguous() for t in column] for column in given)
        master = _as_fp32(params) if low[0] is None else _join(params, low)
        _step(master, grads, m, v, counted(numbers, counts[0]))
        if copies[0] is not None:
            torch._foreach_copy_(
                [copy.view(p.shape) for copy, p in zip(copies, params, strict=True)], master
            )
        if low[0] is not None:
            upper, rest = split(torch.cat([x.reshape(-1) for x in master]))
            torch._foreach_copy_(low, list(rest.split([x.numel() for x in low])))
            master = _unflatten(upper, params)
        if master is not params:
            torch._foreach_copy_(params, master)
        for target, dense in zip((*given[0], *given[2], *given[3]), (*params, *m, *v), strict=True):
            if dense is not target:
                target.copy_(dense)


def _batches(tensors: Sequence[FP32Tensors]) -> Iterator[list[FP32Tensors]]:
    """Tensors of equal types, as lists of mixed ones fall back to one call each, and of equal
    counts; no empty ones.
    """
    kinds: dict[tuple, list[FP32Tensors]] = {}
    for one in tensors:
        if one.param.numel():
            copied = None if one.copy is None else one.copy.dtype
            count = None if one.step_count is None else int(one.step_count)
            kinds.setdefault(
                (one.param.dtype, one.grad.dtype, one.low is None, copied, count), []
            ).append(one)
    for batch in kinds.values():
        first = elements = 0
        for i, one in enumerate(batch):
            elements += one.param.numel()
            if elements > BATCH_ELEMENTS and i > first:
                yield batch[first:i]
                first, elements = i, one.param.numel()
        yield batch[first:]


def _as_fp32(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors themselves if they are fp32, copies otherwise."""
    if tensors[0].dtype == torch.float32:
        return tensors
    copies = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _join(params: list[torch.Tensor], low: list[torch.Tensor]) -> list[torch.Tensor]:
    """Master weights of bfloat16 parameters and their remainders."""
    return _unflatten(join(torch.cat([x.reshape(-1) for x in params]), torch.cat(low)), params)


def _unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        x.view(p.shape) for x, p in zip(flat.split([p.numel() for p in like]), like, strict=True)
    ]


def _step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    numbers: AdamWStep,
) -> None:
    """Update fp32 parameters and moments; gradients of any type."""
    g = _as_fp32(grads)
    if numbers.grad_factor is not None:
        g = list(torch._foreach_mul(g, numbers.grad_factor))
    if numbers.maximize:
        g = list(torch._foreach_neg(g))
    torch._foreach_mul_(m, numbers.beta1)
    torch._foreach_add_(m, g, alpha=1.0 - numbers.beta1)
    torch._foreach_mul_(v, numbers.beta2)
    torch._foreach_addcmul_(v, g, g, value=1.0 - numbers.beta2)
    divisor = torch._foreach_sqrt(v)
    torch._foreach_mul_(divisor, numbers.inverse_sqrt_bias2)
    torch._foreach_add_(divisor, numbers.eps)
    update = torch._foreach_mul(m, numbers.inverse_bias1)
    torch._foreach_div_(update, divisor)
    torch._foreach_mul_(update, numbers.lr)
    torch._foreach_mul_(params, 1.0 - numbers.lr * numbers.weight_decay)
    torch._foreach_sub_(params, update)
