"""Megatron's GPTDataset with an order that does not depend on the length of a run, and a cache that survives a kill."""

from __future__ import annotations

import copy
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from coat_dist.ranks import before_others, rank_and_world
from launch.data.token_files import TokenFiles
from launch.prep import DataError

__all__ = ["EndlessConfig", "EndlessGPTDataset", "Identity"]


@dataclass
class EndlessConfig(GPTDatasetConfig):
    """GPTDatasetConfig and where sample indices are kept."""

    index_cache: str = ""
    """Folder of sample indices. Not ``path_to_cache``: BlendedDataset cannot use that without torch.distributed."""
    token_files: dict[str, TokenFiles] = field(default_factory=dict)
    """What is read from token files, by the name that stands for its prefix in ``blend``."""
    sharers: list[list[int]] = field(default_factory=list)
    """The ranks that share each folder of sample indices; none = all ranks share one."""


class Identity:
    """Stands in for a tokenizer: GPTDataset reads ``eod`` only, its cache keys read ``unique_identifiers``.

    Args:
        vocab_size, eod: of the data.
        digests: one for each data set, of what its sample index depends on. Megatron's own key holds the path but not
            the content, so that data prepared anew would be read with the old index.
    """

    def __init__(self, vocab_size: int, eod: int, digests: list[str]) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.unique_identifiers = {"eod": eod, "indices": digests}


class EndlessGPTDataset(GPTDataset):
    """GPTDataset whose order does not depend on the number of samples asked for.

    Megatron shuffles the documents of all epochs of a run together, so that a run with a later end has another order
    from its first sample on. Here the first epoch is Megatron's, each later one a new permutation of its samples.
    """

    def __init__(
        self, dataset: Any, path: Any, indices: Any, num_samples: int | None, split: Any, config: EndlessConfig
    ) -> None:
        super().__init__(dataset, path, indices, None, split, config)
        self.requested = num_samples
        self.epoch_samples = super().__len__()
        self._epoch = 0
        self._order: np.ndarray | None = None

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: EndlessConfig) -> Any:  # type: ignore[override]
        """What documents are read from: token files where they lie, or a data set of ``prepare_data.py``."""
        return config.token_files.get(dataset_path) or GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self.epoch_samples if self.requested is None else self.requested

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None:
            return super().__getitem__(None)
        epoch, sample = divmod(int(idx), self.epoch_samples)
        if epoch:
            if self._epoch != epoch:
                seed = (self.config.random_seed, epoch, self.index_split.value)
                self._epoch, self._order = epoch, np.random.default_rng(seed).permutation(self.epoch_samples)
            assert self._order is not None
            sample = int(self._order[sample])
        return super().__getitem__(sample)

    def _build_document_sample_shuffle_indices(self) -> Any:
        """Megatron writes these files in place, and takes a file cut short by a kill for complete ever after."""
        shared: EndlessConfig = self.config  # type: ignore[has-type]
        cache = Path(shared.index_cache)
        pattern = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}-*"
        rank = rank_and_world()[0]
        first = next((ranks[0] for ranks in shared.sharers if rank in ranks), 0)

        def build() -> None:
            if len(list(cache.glob(pattern))) < 4:
                with tempfile.TemporaryDirectory(dir=cache) as folder:
                    self.config = copy.copy(shared)
                    self.config.path_to_cache = folder
                    if rank:  # Megatron writes on rank 0 only, and makes in memory what has no files to be written to
                        self.config.path_to_cache, self.config.mock = None, True
                    made = super(EndlessGPTDataset, self)._build_document_sample_shuffle_indices()
                    if rank:
                        self._save(Path(folder), made)
                    for file in Path(folder).iterdir():
                        os.replace(file, cache / file.name)

        try:
            if first:  # Megatron lets rank 0 build before all others, but no other rank before those of its node
                before_others(f"index/{pattern}/{first}", rank == first, build)
            elif rank == 0:
                build()
            self.config = copy.copy(shared)
            self.config.path_to_cache = str(cache)
            return super()._build_document_sample_shuffle_indices()
        except FileNotFoundError as problem:
            raise DataError(
                f"cache_dir: {problem.filename} is not there although rank {first} wrote it, accepted: another folder"
            ) from None
        finally:
            self.config = shared

    def _save(self, folder: Path, indices: Any) -> None:
        """Write the files that Megatron reads."""
        base = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        for name, index in zip(("document", "sample", "shuffle"), indices, strict=True):
            np.save(folder / f"{base}-{name}_index.npy", index)
        (folder / f"{base}-description.txt").write_text(self.unique_description, encoding="utf-8")
