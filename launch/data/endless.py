"""Megatron's GPTDataset, and blends of it, in an order that does not depend on the length of a
run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from coat_dist.ranks import on_first_ranks

BLOCK = 1 << 22  # samples of a blend's table, 42 MB
# It warns that indices are not saved: we do that.
logging.getLogger(GPTDataset.__module__).setLevel(logging.ERROR)
_INDICES = ("document", "sample", "shuffle")


def cached_indices(
    folder: Path,
    sharers: Sequence[Sequence[int]],
    key: str,
    build: Callable[[], Iterable[np.ndarray]],
) -> tuple[np.ndarray, ...]:
    """The arrays that ``build`` makes of a split's documents, memory-mapped from ``folder``;
    collective.

    The first of the ranks that share a folder (``sharers``) builds them. ``key`` identifies their
    content.
    """

    def find_or_build() -> Path:
        if not (whole := folder / key).is_dir():
            unfinished = Path(tempfile.mkdtemp(dir=folder, prefix=".unfinished-"))
            for name, index in zip(_INDICES, build(), strict=True):
                np.save(unfinished / f"{name}.npy", index)
            unfinished.chmod(0o755)  # 0700 would keep other users of the data out
            try:
                os.replace(unfinished, whole)
            except OSError:
                if not whole.is_dir():  # else another run was faster
                    raise
        return whole

    whole = on_first_ranks(sharers, find_or_build)
    return tuple(np.load(whole / f"{name}.npy", mmap_mode="r") for name in _INDICES)


class EndlessGPTDataset(GPTDataset):
    """GPTDataset whose order does not depend on the number of samples asked for.

    Megatron shuffles the documents of all epochs of a run together, so that a run with a later end
    has another order from its first sample on. Here the first epoch is Megatron's, each later one a
    new permutation of its samples.

    Args:
        source: Megatron's IndexedDataset, or token files.
        documents: int32, the numbers of those in this split.
        requested: samples that will be read.
        config: without a blend, so that Megatron leaves the indices in memory.
        cache: :func:`cached_indices` of a folder.
    """

    def __init__(
        self,
        source: Any,
        documents: np.ndarray,
        requested: int,
        split: Split,
        config: GPTDatasetConfig,
        cache: Callable[..., tuple[np.ndarray, ...]],
    ) -> None:
        self._cache = cache
        super().__init__(source, None, documents, None, split, config)
        self.requested = requested
        self.epoch_samples = super().__len__()
        self._epoch, self._order = 0, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.requested

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None:
            return super().__getitem__(None)
        epoch, sample = divmod(int(idx), self.epoch_samples)
        if epoch:
            if self._epoch != epoch:
                seed = (self.config.random_seed, epoch, self.index_split.value)
                self._epoch, self._order = (
                    epoch,
                    np.random.default_rng(seed).permutation(self.epoch_samples),
                )
            sample = int(self._order[sample])
        return super().__getitem__(sample)

    def _build_document_sample_shuffle_indices(self) -> Any:
        """Megatron writes these in place, and takes a file cut short by a kill for complete; its
        key is the path.
        """
        config, split = self.config, self.index_split.name
        about = f"{config.random_seed} {config.sequence_length} {split} ".encode()
        digest = hashlib.sha256(
            about + self.indices.tobytes() + self.dataset.sequence_lengths.tobytes()
        )
        return self._cache(digest.hexdigest()[:32], super()._build_document_sample_shuffle_indices)


class EndlessBlend(Dataset):
    """What Megatron's BlendedDataset draws, with a table of one block in place of one of the whole
    run.

    That table would take 10 bytes a sample on every rank: 15 GB for the 1.5 billion samples of
    OLMo-1B. Here the first ``BLOCK`` samples come from where Megatron takes them, and each later
    block draws from the data sets in the same order, going on in each where the block before ended.

    ``weights`` are positive, one for each data set; ``size`` is the number of samples that will be
    read.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float], size: int, block: int = BLOCK
    ) -> None:
        from megatron.core.datasets import helpers

        self.datasets, self._size = datasets, size
        length = min(block, size)
        self._which, self._sample = np.zeros(length, np.int16), np.zeros(length, np.int64)
        shares = np.asarray(weights, np.float64) / sum(weights)
        helpers.build_blending_indices(
            self._which, self._sample, shares, len(datasets), length, False
        )
        self._drawn = np.bincount(self._which, minlength=len(datasets))
        """Samples that a block takes from each."""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        block, at = divmod(int(idx), len(self._which))
        which = int(self._which[at])
        sample = block * int(self._drawn[which]) + int(self._sample[at])
        return {"dataset_id": which, **self.datasets[which][sample]}
