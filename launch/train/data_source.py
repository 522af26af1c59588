"""Where a run's batches come from: prepared data sets, and how much of them was used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from launch.data.blend import parse_split
from launch.data.dataset import build_datasets
from launch.data.sampler import PretrainSampler, batches
from launch.train.plan import Plan, as_typed

Batch = dict[str, torch.Tensor]


@dataclass
class Progress:
    """Where a run is; saved with every checkpoint."""

    step: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    loss: float | None = None
    """Of the last step, None if not finite: identifies its ``metrics.jsonl``."""


class TokenData:
    """Prepared data sets as the batches of one data-parallel rank. Their order is fixed, so that a
    run can continue in it.

    The training set ends where the run does: after the samples that were used and those of the
    steps that are left. A set of ``--train-steps`` times the present batch would restart within
    what was trained on, if earlier steps had more samples.

    Args:
        begun: where the run is.
        dp_rank: this data-parallel rank.

    Raises:
        DataError: a data set that cannot be read.
    """

    def __init__(self, p: Plan, begun: Progress, dp_rank: int) -> None:
        self._plan, self._dp_rank, a = p, dp_rank, p.args
        asked = a.eval_steps * p.batch.micro * p.dp if a.eval_interval else 0
        with as_typed():
            sets = build_datasets(
                a.data,
                a.split,
                p.model.seq_length,
                train_samples=0
                if a.eval_only
                else begun.consumed_samples + max(a.train_steps - begun.step, 0) * p.batch.total,
                valid_samples=asked,
                test_samples=asked if parse_split(a.split)[2] else 0,
                seed=a.seed,
                cache_dir=a.data_cache,
                without="give --eval-interval 0",
            )
        self.sets: dict[str, Any] = dict(zip(("train", "valid", "test"), sets, strict=True))

    def batches(self, split: str, consumed: int = 0) -> Iterator[Batch] | None:
        """Endless micro-batches of "train", "valid" or "test"; None where there is no such part.

        Args:
            consumed: samples of all ranks that are skipped.
        """
        p, dataset = self._plan, self.sets[split]
        if dataset is None:
            return None
        sampler = PretrainSampler(len(dataset), consumed, p.batch.micro, self._dp_rank, p.dp)
        return batches(dataset, sampler, p.args.num_workers, p.eod)
