"""The three batch sizes of a DeepSpeed configuration: one or two of them determine the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...config import CoatConfigError, Problem
from ...config_errors import got

__all__ = ["MICRO", "STEPS", "TOTAL", "BatchSizes", "batch_sizes"]

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


class BatchSizes(NamedTuple):
    """Samples of one forward pass on one rank, forward passes of one step, and samples of one step on all ranks."""

    micro: int
    accumulation: int
    total: int


def batch_sizes(settings: Mapping[str, Any], dp: int) -> BatchSizes:
    """The three batch sizes for ``dp`` data-parallel ranks; DeepSpeed's rule: total = micro x accumulation x dp.

    Raises:
        CoatConfigError: too few given to know the rest, not positive integers, or contradictory.
    """
    micro, accumulation, total = (settings.get(key) for key in (MICRO, STEPS, TOTAL))
    for key in (MICRO, STEPS, TOTAL):
        if (value := settings.get(key)) is not None and (type(value) is not int or value < 1):
            raise CoatConfigError(Problem(key, got(value), "an integer >= 1"))
    if micro is None and total is None:
        raise CoatConfigError(Problem(MICRO, "missing", f"an integer >= 1 (or {TOTAL})"))
    micro = micro or max(1, (total or 0) // (dp * (accumulation or 1)))
    accumulation = accumulation or max(1, (total or 0) // (micro * dp))
    expected = micro * accumulation * dp
    if expected != (total or expected):
        accepted = f"{MICRO} ({micro}) x {STEPS} ({accumulation}) x data-parallel ranks ({dp}) = {expected}"
        raise CoatConfigError(Problem(TOTAL, got(total), accepted))
    return BatchSizes(micro, accumulation, expected)
