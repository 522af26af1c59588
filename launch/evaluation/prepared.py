"""Samples of prepared data: those that ``pretrain.py`` reads for ``valid_loss`` and ``test_loss``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.data import dataset as data
from launch.evaluation.rows import Row
from launch.train.plan import as_typed

__all__ = ["check_data", "read_samples"]

PARTS = ("train", "valid", "test")


def check_data(paths: Sequence[str]) -> tuple[str, data.DataInfo]:
    """What the data sets say of their one tokenizer, and which of them says most: one that names it, if any does.

    Raises:
        DataError: a data set is missing or damaged, or they were made with different tokenizers.
    """
    with as_typed():
        prefixes, _ = data.parse_blend(paths)
        infos = [data.read_info(prefix) for prefix in prefixes]
        data.check_one_tokenizer(prefixes, infos)
    return data.telling(prefixes, infos)


def read_samples(
    paths: Sequence[str],
    *,
    split: str,
    part: str,
    seq_length: int,
    seed: int,
    samples: int | None = None,
    cache_dir: str | None = None,
) -> list[Row]:
    """The first ``samples`` samples of a part of the data, in the order in which training evaluates them.

    With torch.distributed, call it on all ranks. Every token of a sample but the first is scored, ends of documents
    included; documents of a sample see each other, as in training.

    Args:
        paths, split, seq_length, seed, cache_dir: as of the run.
        part: "valid", "test" or "train".
        samples: None = every sample of the part once; needed where data sets are blended.

    Raises:
        DataError: names the option, or the file; more ``samples`` than the part of one data set has.
    """
    with as_typed():
        train, valid, test = ((samples or 1) * (name == part) for name in PARTS)
        without = "take another --part: with other shares than the run's it has trained on what they hold out"
        built = data.build_datasets(paths, split, seq_length, train, valid, test, seed, cache_dir, without=without)
    dataset: Any = built[PARTS.index(part)]
    there: int | None = getattr(dataset, "epoch_samples", None)  # None of a blend, which goes on for ever
    taken = there if samples is None else samples
    if taken is None:
        raise data.DataError("--samples: missing, accepted: how many of the blend, as --data has several sources")
    if there is not None and taken > there:
        raise data.DataError(
            f"--samples: got {taken}, accepted: up to {there}, which {part} has, or absent for all of them: samples "
            "that come again would make the errors of means too small"
        )
    return [_row(dataset[i]) for i in range(taken)]


def _row(item: dict) -> Row:
    ids = np.append(item["tokens"].numpy(), item["labels"][-1].item()).astype(np.int32)
    return Row(ids, len(ids) - 1)
