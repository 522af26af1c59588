"""Gradients on their way to ZeRO's fp32 partition, with fewer passes and waits: methods overridden
on one instance.

A gradient of ZeRO-1 or 2 is copied to a bucket. DeepSpeed divides the full bucket by the number of
ranks, copies it to another one, reduces that, copies what this rank keeps back, and adds it to the
fp32 partition by way of a copy in fp32. None of these copies is needed, and only what this rank
keeps has to be divided, while it is added. Then DeepSpeed has the host wait at the end of backward;
here the GPU's stream waits. ``step.py`` says when results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Reduction.


def average_later(zero: Any, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
    """In place of ``average_tensor``: leave the division to :func:`reduce_in_place` where that
    can do it.
    """
    from deepspeed import comm

    average, ranks = zero.gradient_average, comm.get_world_size(zero.dp_process_group)
    if average and ranks & (ranks - 1) == 0 and _alike(zero, tensor, communication_data_type):
        zero.gradient_average, zero.coat_undivided = False, ranks
    try:
        type(zero).average_tensor(zero, tensor, communication_data_type)
    finally:
        zero.gradient_average, zero.coat_undivided = average, 1


def _alike(zero: Any, tensor: torch.Tensor, communication_data_type: torch.dtype) -> bool:
    """Whether all of a bucket goes through :func:`reduce_in_place` and is reduced in place, over
    the same ranks, and may be divided afterwards: by a power of two, in a type whose range is
    fp32's, that gives the same bits.
    """
    return (
        zero.reduce_scatter
        and zero.use_multi_rank_bucket_allreduce
        and zero.sequence_parallel_size == 1
        and communication_data_type == tensor.dtype
        and tensor.dtype in (torch.bfloat16, torch.float32)
        and not zero.ipg_buckets[communication_data_type].has_moe_params
    )


def reduce_in_place(
    zero: Any,
    small_bucket: Sequence[torch.Tensor],
    communication_data_type: torch.dtype,
    **call: Any,
) -> None:
    """In place of ``allreduce_and_copy_with_multiple_ranks``: the same values, where slices of a
    bucket lie in a row. Slices that other ranks keep hold the sum afterwards; those are read only
    where ZeRO-1 accumulates in an attribute of its own, which is left to DeepSpeed.

    ZeRO divides the whole bucket before, and gives in ``call`` the group, the ranks that keep each
    slice, and the part of the fp32 partition that each slice is added to, or None.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    ranks = getattr(zero, "coat_undivided", 1)
    other = zero.use_grad_accum_attribute or zero.sequence_parallel_size > 1
    whole = None if other else _in_a_row(small_bucket)
    if whole is None or communication_data_type != whole.dtype:
        for one in small_bucket if ranks > 1 else ():
            one.div_(ranks)
        original = type(zero).allreduce_and_copy_with_multiple_ranks
        original(zero, small_bucket, communication_data_type, **call)
        return
    comm.all_reduce(whole, group=call["process_group"])
    if zero.overlap_comm and not get_accelerator().resolves_data_dependency():
        whole.record_stream(zero.reduction_stream)
    own = comm.get_rank(call["process_group"])
    kept = zip(small_bucket, call["bucket_ranks"], call["output_bucket"], strict=True)
    for reduced, keepers, output in kept:
        if own not in keepers:
            continue
        if output is not None:
            add_without_a_copy(zero, output, reduced, 1 / ranks)
        elif ranks > 1:
            reduced.mul_(1 / ranks)


def _in_a_row(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory of tensors each of which begins where the one before it ends; None where they
    do not.
    """
    first, at = tensors[0], tensors[0].data_ptr()
    for one in tensors:
        if one.data_ptr() != at or one.dtype != first.dtype or not one.is_contiguous():
            return None
        if one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += one.nbytes
    return first.as_strided((sum(one.numel() for one in tensors),), (1,), first.storage_offset())


# The sum.


def build_zeros(zero: Any, group_idx: int) -> Any:
    """In place of ``_build_compact_grad_partition_buffer``: the same zeros, which remember the
    micro-batch in which they were made, and the offsets of slices that were written since.
    """
    group = type(zero)._build_compact_grad_partition_buffer(zero, group_idx)
    group.coat_micro_step, group.coat_written = zero.micro_step_id, set()
    return group


def add_without_a_copy(
    zero: Any, output: torch.Tensor | None, source: torch.Tensor, factor: float = 1.0
) -> None:
    """In place of ``_add_to_grad_partition_buffer``: torch converts each element as it adds it, to
    the same bits. The first gradient of a parameter is written over the zeros, which is the same
    but for -0; only in the micro-batch in which they were made: between two, programs may write
    gradients.
    """
    if output is None:
        return
    for group in zero.averaged_gradients.values():
        if getattr(group, "coat_micro_step", None) != zero.micro_step_id:
            continue
        flat = group.flat_partition
        offset = output.data_ptr() - flat.data_ptr()
        if 0 <= offset < flat.nbytes and offset not in group.coat_written:
            group.coat_written.add(offset)
            torch.mul(source, factor, out=output) if factor != 1.0 else output.copy_(source)
            return
    output.add_(source, alpha=factor)


# Waiting.


def wait_on_the_gpu(zero: Any) -> None:
    """In place of ``independent_gradient_partition_epilogue``, whose one wait is for the reductions
    that were started.

    What is freed after it belongs to one of the two streams, which wait for each other. After a
    micro-batch that is not a step's last the host waits as before: it would run ahead and take new
    buckets while those before are in use.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator, original = get_accelerator(), type(zero).independent_gradient_partition_epilogue
    if not zero.is_gradient_accumulation_boundary():
        original(zero)
        return
    # An attribute of the instance hides the method.
    accelerator.synchronize = lambda *_: accelerator.current_stream().wait_stream(
        zero.reduction_stream
    )
    try:
        original(zero)
    finally:
        del accelerator.synchronize
