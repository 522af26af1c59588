"""ZeRO's 16-bit weights after the update, written and gathered while it goes on: methods overridden on one instance.

After the optimizer ZeRO-1 and 2 read their fp32 partition once more to write the 16-bit one, and when all of it is
written they gather it. ``CoatAdamW`` can write both, in parts; each part travels to the other ranks while the next one
is updated. The update is bound by this GPU's memory and the exchange by the link to the others, so that where both take
about as long half of the time is saved. With many ranks the exchange takes far longer, and DeepSpeed's one collective
is left as it is.

``step.py`` says when all of this is done. Weights are the same bits.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..reference import adamw
from . import step

__all__ = [
    "Parts",
    "gather_while_updating",
    "has_16_bit_copy",
    "has_large_partitions",
    "write_16_bit_weights_in_the_step",
]

FEW = 8
"""Ranks up to which each sends its parts to every other one."""


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


# Gathering.


def has_large_partitions(zero: Any) -> bool:
    """Whether parts can travel while the update goes on: some partition is written in several."""
    return has_16_bit_copy(zero) and bool(_large(zero))


def gather_while_updating(zero: Any) -> None:
    """Send parts of the 16-bit partitions to the other ranks as soon as the step has written them.

    Needs :func:`write_16_bit_weights_in_the_step`, whose ``step`` it wraps.
    """
    zero.step = types.MethodType(_step_in_parts, zero)


def _step_in_parts(zero: Any, closure: Any = None) -> None:
    """ZeRO's step, in which :class:`Parts` gathers."""
    from deepspeed.runtime.zero import stage_1_and_2

    parts, original = Parts(zero), stage_1_and_2.all_gather_dp_groups
    zero.optimizer.when_written = parts.send
    stage_1_and_2.all_gather_dp_groups = functools.partial(parts.gather_the_rest, original)
    try:
        _step_and_restore(zero, closure)
    finally:
        del zero.optimizer.when_written
        stage_1_and_2.all_gather_dp_groups = original


def _large(zero: Any) -> list[int]:
    """The numbers of the groups whose partitions, all of one size, are written in parts, for few ranks. The same
    everywhere, as every rank has to send and receive."""
    return [
        number
        for number, (partitions, group) in enumerate(
            zip(zero.parallel_partitioned_bit16_groups, zero.real_dp_process_group, strict=True)
        )
        if 1 < dist.get_world_size(group) <= FEW and len(partitions[0]) > adamw.PART
    ]


class Parts:
    """What a step sends, and receives from the other ranks."""

    def __init__(self, zero: Any) -> None:
        self._of: dict[int, tuple[int, list[torch.Tensor], Any]] = {}
        """By the address of this rank's partition, which is what the optimizer writes: group, all partitions, ranks."""
        for number in _large(zero):
            partitions, group = zero.parallel_partitioned_bit16_groups[number], zero.real_dp_process_group[number]
            self._of[partitions[dist.get_rank(group)].data_ptr()] = number, partitions, group
        self._sent: Counter[int] = Counter()
        self._works: list[dist.Work] = []

    def send(self, written: torch.Tensor, first: int, end: int) -> None:
        """Exchange elements ``first`` to ``end`` of every rank's partition; ``written`` is this rank's."""
        if written.data_ptr() not in self._of:
            return
        number, partitions, group = self._of[written.data_ptr()]
        own, ranks, exchanges = dist.get_rank(group), dist.get_world_size(group), []
        for away in range(1, ranks):
            to, source = (own + away) % ranks, (own - away) % ranks
            theirs = partitions[source].detach()[first:end]
            exchanges.append(dist.P2POp(dist.isend, written.detach()[first:end], group=group, group_peer=to))
            exchanges.append(dist.P2POp(dist.irecv, theirs, group=group, group_peer=source))
        self._works += dist.batch_isend_irecv(exchanges)
        self._sent[number] += end - first

    def gather_the_rest(
        self,
        gather: Callable[..., None],
        groups_flat: list[torch.Tensor],
        partitioned_param_groups: list[list[torch.Tensor]],
        dp_process_group: list[Any],
        **options: Any,
    ) -> None:
        """In place of ``all_gather_dp_groups``, which is ``gather``: wait for the parts; the other groups are left to
        it. On a GPU the stream that computes waits."""
        for work in self._works:
            work.wait()
        left = [i for i, one in enumerate(partitioned_param_groups) if self._sent[i] < len(one[0])]
        lists = groups_flat, partitioned_param_groups, dp_process_group
        gather(*([values[i] for i in left] for values in lists), **options)
