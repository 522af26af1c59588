"""One AdamW step with fp32 moments on many tensors: one launch on a GPU.

The work is done by ``adamw_fp32_kernel.py``. On a CPU, where kernels would be interpreted, it is
done by the definition in ``reference/adamw.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import increment_version

from ..reference import adamw
from ..reference.adamw import AdamWStep, FP32Tensors
from ..reference.adamw_batch import Batch, written
from .adamw_fp32_kernel import step_contiguous

__all__ = ["adamw_fp32_steps"]


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
