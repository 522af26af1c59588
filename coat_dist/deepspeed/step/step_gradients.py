"""Gradients on their way to ZeRO's fp32 partition, with fewer passes and waits: methods overridden
on one instance.

A gradient of ZeRO-1 or 2 is copied to a bucket. DeepSpeed divides the full bucket by the number of
ranks, copies it to another one, reduces that, copies what this rank keeps back, and adds it to the
fp32 partition by way of a copy in fp32. None of these copies is needed, and only what this rank
keeps has to be divided, while it is added. Then DeepSpeed has the host wait at the end of backward;
here the GPU's stream waits. ``step.py`` says when results are the same.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import step

__all__ = ["add_without_a_copy", "has_reduction_stream", "reduce_where_they_are", "wait_on_the_gpu"]


# Reduction.


def reduce_where_they_are(zero: Any) -> None:
    """Let buckets be reduced in place, and divided where they are added to the fp32 partition."""
    zero.coat_undivided = 1
    zero.average_tensor = types.MethodType(_average, zero)
    zero.allreduce_and_copy_with_multiple_ranks = types.MethodType(_reduce, zero)


def _average(zero: Any, tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
    """In place of ``average_tensor``, whose division :func:`_reduce` makes up for where it can."""
    from deepspeed import comm

    average, ranks = zero.gradient_average, comm.get_world_size(zero.dp_process_group)
    if average and ranks & (ranks - 1) == 0 and _alike(zero, tensor, communication_data_type):
        zero.gradient_average, zero.coat_undivided = False, ranks
    try:
        type(zero).average_tensor(zero, tensor, communication_data_type)
    finally:
        zero.gradient_average, zero.coat_undivided = average, 1


def _alike(zero: Any, tensor: torch.Tensor, communication_data_type: torch.dtype) -> bool:
    """Whether all of a bucket goes through :func:`_reduce` and is reduced in place, over the same
    ranks, and may be divided afterwards: by a power of two, in a type whose range is fp32's, that
    gives the same bits.
    """
    every = (
        zero.reduce_scatter
        and zero.use_multi_rank_bucket_allreduce
        and zero.sequence_parallel_size == 1
    )
    dtype = communication_data_type == tensor.dtype and tensor.dtype in (
        torch.bfloat16,
        torch.float32,
    )
    return every and dtype and not zero.ipg_buckets[communication_data_type].has_moe_params


def _reduce(
    zero: Any,
    small_bucket: Sequence[torch.Tensor],
    communication_data_type: torch.dtype,
    log: Any = None,
    divide: bool = True,
    process_group: Any = None,
    bucket_ranks: Sequence[Any] = (),
    output_bucket: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """In place of ``allreduce_and_copy_with_multiple_ranks``: the same values, where slices of a
    bucket lie in a row. Slices that other ranks keep hold the sum afterwards; those are read only
    where ZeRO-1 accumulates in an attribute of its own, which is left to DeepSpeed.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    group, ranks = (
        zero.dp_process_group if process_group is None else process_group,
        zero.coat_undivided,
    )
    other = divide or zero.use_grad_accum_attribute or zero.sequence_parallel_size > 1
    whole = None if other else _in_a_row(small_bucket)
    if whole is None or communication_data_type != whole.dtype:
        for one in small_bucket if ranks > 1 else ():
            one.div_(ranks)
        original = type(zero).allreduce_and_copy_with_multiple_ranks
        original(
            zero,
            small_bucket,
            communication_data_type,
            log,
            divide,
            group,
            bucket_ranks,
            output_bucket,
        )
        return
    comm.all_reduce(whole, group=group)
    if zero.overlap_comm and not get_accelerator().resolves_data_dependency():
        whole.record_stream(zero.reduction_stream)
    own = comm.get_rank(group)
    outputs = [None] * len(small_bucket) if output_bucket is None else output_bucket
    for reduced, keepers, output in zip(small_bucket, bucket_ranks, outputs, strict=True):
        if own not in keepers if isinstance(keepers, frozenset) else own != keepers:
            continue
        if output is not None:
            _add(zero, output, reduced, 1 / ranks)
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


class _Zeros(NamedTuple):
    """A group's part of the fp32 partition, which DeepSpeed has made of zeros."""

    begin: int  # address
    end: int
    micro_step: int
    written: set[int]  # addresses of the parameters' slices to which a gradient was added since


def add_without_a_copy(zero: Any) -> None:
    """Let a sum read the gradient in its own type, and the first one not read the zeros that are
    there.
    """
    zero.coat_zeros = {}
    zero._build_compact_grad_partition_buffer = types.MethodType(_build, zero)
    zero._add_to_grad_partition_buffer = types.MethodType(_add, zero)


def _build(zero: Any, group_idx: int) -> Any:
    """In place of ``_build_compact_grad_partition_buffer``: the same zeros, remembered."""
    group = type(zero)._build_compact_grad_partition_buffer(zero, group_idx)
    begin, end = (
        group.flat_partition.data_ptr(),
        group.flat_partition.data_ptr() + group.flat_partition.nbytes,
    )
    # Those of the step before are gone, and the allocator may have given this group their memory.
    apart = {i: one for i, one in zero.coat_zeros.items() if one.end <= begin or end <= one.begin}
    zero.coat_zeros = apart | {group_idx: _Zeros(begin, end, zero.micro_step_id, set())}
    return group


def _add(zero: Any, output: torch.Tensor | None, source: torch.Tensor, factor: float = 1.0) -> None:
    """In place of ``_add_to_grad_partition_buffer``: torch converts each element as it adds it, to
    the same bits. The first gradient of a parameter is written over the zeros, which is the same
    but for -0; only in the micro-batch in which they were made: between two, programs may write
    gradients.
    """
    if output is None:
        return
    at = output.data_ptr()
    for group, one in zero.coat_zeros.items():
        if (
            one.begin <= at < one.end
            and at not in one.written
            and one.micro_step == zero.micro_step_id
        ):
            partition = getattr(zero.averaged_gradients.get(group), "flat_partition", None)
            if partition is None or partition.data_ptr() != one.begin:  # moved, or of a step before
                continue
            one.written.add(at)
            torch.mul(source, factor, out=output) if factor != 1.0 else output.copy_(source)
            return
    output.add_(source, alpha=factor)


# Waiting.


def has_reduction_stream(zero: Any) -> bool:
    """Whether gradients are reduced on a stream of their own, for which the host waits at the end
    of backward. Only with contiguous buckets, whose reduction first waits for the stream that
    computes; without them the host has to wait.
    """
    if not step.may_leave_out_passes(zero) or zero.reduction_stream is None:
        return False
    return bool(zero.overlap_comm and zero.contiguous_gradients)


def wait_on_the_gpu(zero: Any) -> None:
    """Let the stream that computes wait at the end of a step's last backward, and not the host."""
    zero.independent_gradient_partition_epilogue = types.MethodType(_epilogue, zero)


def _epilogue(zero: Any) -> None:
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
