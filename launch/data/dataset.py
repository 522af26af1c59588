"""Training data: Megatron's GPTDataset over what ``prepare_data.py`` wrote, and the order in which
samples are used.

The sample at position ``p`` depends on the data, the sequence length and the seed alone. It does
not depend on how many samples a run asks for, nor on the number of ranks: a run that stops after
any number of samples and continues from ``consumed_samples``, with another data-parallel size or a
later end, sees exactly the samples that were to come.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from coat_dist.ranks import on_first_ranks
from coat_dist.shared_folders import sharing
from launch.common.errors import DataError
from launch.data.blend import check_one_tokenizer, parse_blend, parse_split, read_info
from launch.data.endless import EndlessBlend, EndlessGPTDataset, cached_indices
from launch.data.mixture import is_mixture, read_mixture
from launch.data.token_files import TokenFiles, build_index, cache_folder

Part = tuple[str, float, IndexedDataset | TokenFiles]
"""Name, share of the samples and documents of one data set. A source of a description is named
``DESCRIPTION#NAME``.
"""


def _open(prefix: str) -> IndexedDataset:
    try:
        opened = IndexedDataset(prefix)
    except Exception as problem:  # assertions and errors of struct and NumPy
        raise DataError(
            f"data: {prefix}.idx: got no Megatron index ({problem!r}), accepted: prepare it again"
        ) from None
    needed = int(opened.sequence_lengths.sum(dtype=np.int64)) * opened.index.dtype_size
    if (found := os.path.getsize(f"{prefix}.bin")) != needed:
        raise DataError(
            f"data: {prefix}.bin: got {found} bytes, accepted: the {needed} of its index "
            "(--overwrite)"
        )
    return opened


def _parts(
    prefixes: Sequence[str],
    weights: Sequence[float] | None,
    cache: str,
    sharers: Sequence[Sequence[int]],
) -> list[Part]:
    """Data sets, and each source of a description, with their shares. Without weights, by number of
    tokens.

    The weight of a description is divided among its sources. Index files are made where they are
    not there, by the first of the ranks that share a cache.
    """
    parts: list[Part] = []
    for number, prefix in enumerate(prefixes):
        if is_mixture(prefix):
            mixture = read_mixture(prefix)
            index = on_first_ranks(sharers, functools.partial(build_index, mixture, cache))
            opened = [
                TokenFiles(source, path)
                for source, path in zip(mixture.sources, index, strict=True)
            ]
            here = [
                (f"{prefix}#{s.name}", s.weight, of)
                for s, of in zip(mixture.sources, opened, strict=True)
            ]
        else:
            here = [(prefix, None, _open(prefix))]
        tokens = [float(of.sequence_lengths.sum(dtype=np.int64)) for _, _, of in here]
        own = [weight or count for (_, weight, _), count in zip(here, tokens, strict=True)]
        whole = sum(own)
        if weights:
            whole = weights[number]
        elif len(prefixes) > 1:
            whole = sum(tokens)
        parts += [
            (name, part * whole / sum(own), of)
            for (name, _, of), part in zip(here, own, strict=True)
        ]
    return parts


def build_datasets(
    paths: Sequence[str],
    split: str,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    seed: int,
    cache_dir: str | None = None,
    without: str | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Train, valid and test sets of one or several prepared data sets. With torch.distributed, call
    it on all ranks.

    Args:
        paths: see :func:`parse_blend`; without weights a data set counts by its number of tokens.
        split: shares of the documents, e.g. ``"969,30,1"``.
        seq_length: tokens of a sample.
        train_samples, valid_samples, test_samples: samples that will be read, 0 = leave this set
            out (None). More than the data holds repeat it, in a new order.
        seed: of the shuffles.
        cache_dir: where indices are kept; None = beside the first data set, or in the user's cache.
        without: how a program's user leaves out valid and test set, for errors; None = by 0
            samples.

    Returns:
        Datasets whose items are dicts of ``tokens``, ``labels``, ``position_ids`` (int64
        ``[seq_length]``) and ``loss_mask`` (fp32 ``[seq_length]``).

    Raises:
        DataError: names the argument or file, what was given and what is accepted.
    """
    prefixes, weights = parse_blend(paths)
    matrix = convert_split_vector_to_split_matrix(parse_split(split))
    infos = [read_info(prefix) for prefix in prefixes]
    check_one_tokenizer(prefixes, infos)
    folder = cache_folder(prefixes, cache_dir)
    sharers = sharing(Path(folder))
    parts = _parts(prefixes, weights, folder, sharers)
    cache = functools.partial(cached_indices, Path(folder), sharers)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        tokenizer=SimpleNamespace(
            vocab_size=infos[0].vocab_size, eod=infos[0].eod, unique_identifiers={}
        ),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = (train_samples, valid_samples, test_samples)
    sets: list[Dataset | None] = []
    for of, bounds, size in zip(Split, matrix, sizes, strict=True):
        built = [
            EndlessGPTDataset(
                part[2], _documents(part, of, bounds, seq_length, without), size, of, config, cache
            )
            for part in (parts if size else ())
        ]
        if len(built) > 1:
            sets.append(EndlessBlend(built, [share for _, share, _ in parts], size))
        else:
            sets.append(built[0] if built else None)
    return tuple(sets)  # type: ignore[return-value]


def _documents(
    part: Part,
    split: Split,
    bounds: tuple[float, float] | None,
    seq_length: int,
    without: str | None,
) -> np.ndarray:
    """Numbers of the documents of a split, rounded as Megatron's builder does; refuses one
    without a sample.
    """
    name, _, source = part
    documents = len(source.sequence_lengths)
    begin, end = (int(round(bound * float(documents))) for bound in bounds or (0.0, 0.0))
    tokens = int(source.sequence_lengths[begin:end].sum(dtype=np.int64))
    if tokens <= seq_length:
        left_out = (
            "" if split is Split.train else f", or {without or f'ask for 0 {split.name} samples'}"
        )
        raise DataError(
            f"split: {split.name} gets {end - begin} of the {documents} documents of {name}, "
            f"{tokens} tokens, "
            f"accepted: at least {seq_length + 1} for one sample; prepare more data or change the "
            f"shares{left_out}"
        )
    return np.arange(begin, end, dtype=np.int32)
