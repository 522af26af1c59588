"""ZeRO's 16-bit weights, written by the step: methods overridden on one instance.

After the optimizer ZeRO-1 and 2 read their fp32 partition once more to write the 16-bit one. ``CoatAdamW`` can write
both. ``step.py`` says when this is done; weights are the same bits.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from . import step

__all__ = ["has_16_bit_copy", "write_16_bit_weights_in_the_step"]


def has_16_bit_copy(zero: Any) -> bool:
    """Whether ZeRO copies its fp32 partition to a 16-bit one after the step, so that CoatAdamW can write both."""
    half = step.may_leave_out_passes(zero) and zero.dtype in (torch.bfloat16, torch.float16)
    return bool(half and not zero.low_precision_master_weights_and_grads)


def write_16_bit_weights_in_the_step(zero: Any) -> None:
    """Let CoatAdamW write the 16-bit partition in the pass that writes the fp32 one."""
    zero._optimizer_step = types.MethodType(_step_with_copy, zero)
    zero.step = types.MethodType(_step_and_restore, zero)


def _step_with_copy(zero: Any, group_no: int) -> None:
    """The step of one group, whose fp32 partition is copied to the 16-bit one in the same pass.

    What ZeRO copies next is ``single_partition_of_fp32_groups[group_no]``. Until the end of ZeRO's step the 16-bit
    partition itself stands there, and torch does not copy a tensor onto itself.
    """
    masters, weights = zero.single_partition_of_fp32_groups, zero.get_bit16_param_group(group_no)[0]
    zero.optimizer.copies = {masters[group_no]: weights}
    try:
        type(zero)._optimizer_step(zero, group_no)
    finally:
        del zero.optimizer.copies
    masters[group_no].grad = None  # ZeRO would clear that of the tensor which it finds
    masters[group_no] = weights


def _step_and_restore(zero: Any, closure: Any = None) -> None:
    masters = list(zero.single_partition_of_fp32_groups)
    try:
        type(zero).step(zero, closure)
    finally:
        zero.single_partition_of_fp32_groups[:] = masters
