"""Several data sets drawn from by weight, for runs of any length, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

__all__ = ["BLOCK", "EndlessBlend"]

BLOCK = 1 << 22
"""Samples of the table, 42 MB."""


class EndlessBlend(Dataset):
    """What Megatron's BlendedDataset draws, with a table of one block in place of one of the whole run.

    That table would take 10 bytes a sample on every rank: 15 GB for the 1.5 billion samples of OLMo-1B. Here the first
    ``BLOCK`` samples come from where Megatron takes them, and each later block draws from the data sets in the same
    order, going on in each where the block before ended.

    Args:
        datasets: endless, as :class:`launch.data.gpt_dataset.EndlessGPTDataset`.
        weights: one each, positive.
        size: samples that will be read.
        block: for tests.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], size: int, block: int = BLOCK) -> None:
        from megatron.core.datasets import helpers

        self.datasets, self._size = list(datasets), size
        length = min(block, size)
        self._which, self._sample = np.zeros(length, np.int16), np.zeros(length, np.int64)
        shares = np.asarray(weights, np.float64) / sum(weights)
        helpers.build_blending_indices(self._which, self._sample, shares, len(datasets), length, False)
        self._drawn = np.bincount(self._which, minlength=len(datasets))
        """Samples that a block takes from each."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        block, at = divmod(int(idx), len(self._which))
        which = int(self._which[at])
        sample = block * int(self._drawn[which]) + int(self._sample[at])
        return {"dataset_id": which, **self.datasets[which][sample]}
