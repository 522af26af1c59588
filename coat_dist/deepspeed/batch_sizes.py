"""The three batch sizes of a DeepSpeed configuration, of which one or two say the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import CoatConfigError, look_up
from ..ranks import rank_and_world

__all__ = ["MICRO", "STEPS", "TOTAL", "BatchSizes", "batch_sizes", "data_parallel_ranks"]

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True)
class BatchSizes:
    """Samples of one forward pass on one rank, forward passes of one step, and samples of one step on all ranks."""

    micro: int
    accumulation: int
    total: int


def batch_sizes(settings: Mapping[str, Any], dp: int) -> BatchSizes:
    """The three batch sizes for ``dp`` data-parallel ranks; DeepSpeed's rule: total = micro x accumulation x dp.

    Raises:
        CoatConfigError: too few given to know the rest, not positive integers, or contradictory.
    """
    keys = MICRO, STEPS, TOTAL
    micro, accumulation, total = (settings.get(k) for k in keys)
    for key, value in zip(keys, (micro, accumulation, total), strict=True):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CoatConfigError(f"{key}: got {value!r}, accepted: an integer >= 1")
    if micro is None and total is None:
        raise CoatConfigError(f"{keys[0]}: missing, accepted: an integer >= 1 (or {keys[2]})")
    if micro is None:
        assert total is not None
        micro = max(1, total // (dp * (accumulation or 1)))
    if accumulation is None:
        accumulation = max(1, (total or 0) // (micro * dp))
    expected = micro * accumulation * dp
    if expected != (total or expected):
        raise CoatConfigError(
            f"train_batch_size: got {total}, accepted: {keys[0]} ({micro}) x {keys[1]} ({accumulation}) x "
            f"data-parallel ranks ({dp}) = {expected}"
        )
    return BatchSizes(micro, accumulation, expected)


def data_parallel_ranks(given: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    """How many DeepSpeed will count, once torch.distributed is there; None where other things than ranks and an mpu say
    it: a mesh, sequence parallelism, DeepSpeed's own tensor parallelism.

    Args:
        given: the arguments of ``deepspeed.initialize``, by name.
        settings: its configuration.
    """
    import deepspeed

    model, mpu = given.get("model"), given.get("mpu")
    if isinstance(model, deepspeed.PipelineModule):
        mpu = model.mpu()
    if callable(count := getattr(mpu, "get_data_parallel_world_size", None)):
        return int(count())
    others = {"sequence_parallel_size", "data_parallel_size"} & {*settings}
    if (
        mpu is not None
        or "mesh_param" in given
        or others
        or (look_up(settings, "tensor_parallel.autotp_size") or 0) > 1
    ):
        return None
    return rank_and_world()[1]
