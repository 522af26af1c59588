"""Training data: Megatron's GPTDataset over what ``prepare_data.py`` wrote, and the order in which samples are used.

The sample at position ``p`` depends on the data, the sequence length and the seed alone. It does not depend on how many
samples a run asks for, nor on the number of ranks: a run that stops after any number of samples and continues from
``consumed_samples``, with another data-parallel size or a later end, sees exactly the samples that were to come.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
from megatron.core.datasets.indexed_dataset import DType
from torch.utils.data import Dataset

from coat_dist.checkpoint.team import nodes_of_ranks, sharing
from coat_dist.ranks import on_first_ranks
from launch.data.blend import (
    DataInfo,
    check_one_tokenizer,
    parse_blend,
    parse_split,
    read_info,
    telling,
    without_suffix,
)
from launch.data.cache import cache_folder
from launch.data.endless_blend import EndlessBlend
from launch.data.gpt_dataset import EndlessConfig, EndlessGPTDataset, Identity
from launch.data.mixture import Mixture, is_mixture, read_mixture
from launch.data.sampler import PretrainSampler, batches
from launch.data.token_files import TokenFiles, build_index
from launch.prep import DataError

__all__ = [
    "DataError",
    "DataInfo",
    "Mixture",
    "PretrainSampler",
    "batches",
    "build_datasets",
    "check_one_tokenizer",
    "indexed_lengths",
    "is_mixture",
    "parse_blend",
    "parse_split",
    "read_info",
    "read_mixture",
    "telling",
    "without_suffix",
]

SPLITS = ("train", "valid", "test")
_INDEX_HEAD = struct.Struct("<9sQBQQ")  # magic, version, type of tokens, sequences, document boundaries


def indexed_lengths(prefix: str) -> np.ndarray:
    """Document lengths of a data set, int32 ``[documents]``; checks that both files are whole and one set."""
    with open(f"{prefix}.idx", "rb") as file:
        head = file.read(_INDEX_HEAD.size)
        try:
            magic, version, code, sequences, documents = _INDEX_HEAD.unpack(head)
            item = DType.size(code)
        except (struct.error, ValueError):
            magic = b""
        size = os.path.getsize(f"{prefix}.idx")
        if magic != b"MMIDIDX\0\0" or version != 1 or size != len(head) + 12 * sequences + 8 * documents:
            raise DataError(f"data: {prefix}.idx ({size} bytes) is damaged or no Megatron index; prepare it again")
        lengths = np.fromfile(file, np.int32, sequences)
    needed, found = int(lengths.sum(dtype=np.int64)) * item, os.path.getsize(f"{prefix}.bin")
    if needed != found:
        raise DataError(f"data: {prefix}.bin has {found} bytes, accepted: the {needed} of its index; prepare it again")
    return lengths


@dataclass(frozen=True)
class _Part:
    """One data set of a blend."""

    name: str
    """Its prefix; of token files, the description's path, "#" and the source's name."""
    weight: float
    lengths: np.ndarray
    """Of documents, int32."""
    files: TokenFiles | None = None


def _parts(
    prefixes: Sequence[str], weights: Sequence[float] | None, cache: str, sharers: Sequence[Sequence[int]]
) -> list[_Part]:
    """What to draw from: data sets, and each source of a description. Without weights, by number of tokens.

    The weight of a description is divided among its sources. Index files are made where they are not there, by the
    first of the ranks that share a cache.
    """
    found: list[_Part] = []
    for number, prefix in enumerate(prefixes):
        if not is_mixture(prefix):
            here = [_Part(prefix, 1.0, indexed_lengths(prefix))]
        else:
            mixture = read_mixture(prefix)
            index = on_first_ranks(sharers, functools.partial(build_index, mixture, cache))
            files = [TokenFiles(s, mixture.eos, path) for s, path in zip(mixture.sources, index, strict=True)]
            here = [
                _Part(f"{prefix}#{s.name}", s.weight or float(f.tokens), f.sequence_lengths, f)
                for s, f in zip(mixture.sources, files, strict=True)
            ]
        own = sum(part.weight for part in here)
        tokens = float(sum(part.lengths.sum(dtype=np.int64) for part in here))
        whole = weights[number] if weights else own if len(prefixes) == 1 else tokens
        found += [replace(part, weight=part.weight * (whole / own)) for part in here]
    return found


def build_datasets(
    paths: Sequence[str],
    split: str,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    seed: int,
    cache_dir: str | None = None,
    eod_mask_loss: bool = False,
    without: str | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Train, valid and test sets of one or several prepared data sets. With torch.distributed, call it on all ranks.

    Args:
        paths: see :func:`parse_blend`; without weights a data set counts by its number of tokens.
        split: shares of the documents, e.g. ``"969,30,1"``.
        seq_length: tokens of a sample.
        train_samples, valid_samples, test_samples: samples that will be read, 0 = leave this set out (None).
            More than the data holds repeat it, in a new order.
        seed: of the shuffles.
        cache_dir: where sample indices are kept; None = ``PREFIX.cache``, or the user's cache
            folder if that is not writable.
        eod_mask_loss: take the loss of predicting what follows an end of document out.
        without: how a program's user leaves out valid and test set, for errors; None = by 0 samples.

    Returns:
        Datasets whose items are dicts of ``tokens``, ``labels``, ``position_ids`` (int64 ``[seq_length]``) and
        ``loss_mask`` (fp32 ``[seq_length]``).

    Raises:
        DataError: names the argument or file, what was given and what is accepted.
    """
    prefixes, weights = parse_blend(paths)
    shares = parse_split(split)
    sizes = (train_samples, valid_samples, test_samples)
    amounts = {f"{name}_samples": (size, 0) for name, size in zip(SPLITS, sizes, strict=True)}
    for name, (value, low) in {"seq_length": (seq_length, 1), **amounts}.items():
        if value < low:
            raise DataError(f"{name}: got {value}, accepted: {low} or more")
    infos = [read_info(prefix) for prefix in prefixes]
    check_one_tokenizer(prefixes, infos)
    try:
        from megatron.core.datasets import helpers  # noqa: F401
    except ImportError as problem:
        raise DataError(
            f"megatron-core: its compiled dataset helpers are missing ({problem}), accepted: a wheel for this "
            "Python (pip install --force-reinstall megatron-core), or run make in its folder megatron/core/datasets"
        ) from None
    cache = cache_folder(prefixes, cache_dir)
    sharers = sharing(Path(cache), nodes_of_ranks())
    parts = _parts(prefixes, weights, cache, sharers)
    lengths = [part.lengths for part in parts]
    config = EndlessConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([part.name for part in parts], [part.weight for part in parts] if len(parts) > 1 else None),
        split=",".join(f"{s:.12f}" for s in shares),
        tokenizer=Identity(
            infos[0].vocab_size, infos[0].eod, [hashlib.sha256(x.tobytes()).hexdigest() for x in lengths]
        ),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.1,  # nothing is built for it, see EndlessGPTDataset.__len__
        index_cache=cache,
        sharers=sharers,
        token_files={part.name: part.files for part in parts if part.files is not None},
    )
    assert config.split_matrix is not None
    _check_amounts([part.name for part in parts], lengths, config.split_matrix, sizes, seq_length, without)
    config.split_matrix = [m if n else None for m, n in zip(config.split_matrix, sizes, strict=True)]  # type: ignore[misc]
    if len(parts) > 1 and config.token_files:
        return _mixed(parts, sizes, config)
    return tuple(BlendedMegatronDatasetBuilder(EndlessGPTDataset, list(sizes), lambda: True, config).build())  # type: ignore


def _mixed(parts: Sequence[_Part], sizes: Sequence[int], config: EndlessConfig) -> tuple[Any, ...]:
    """Train, valid and test sets with token files among their ``parts``, which may be too many for a table of all."""
    built = []
    for part in parts:
        alone = copy.copy(config)
        alone.blend = ([part.name], None)
        built.append(BlendedMegatronDatasetBuilder(EndlessGPTDataset, list(sizes), lambda: True, alone).build())
    weights = [part.weight for part in parts]
    return tuple(
        EndlessBlend(sets, weights, size) if size else None
        for sets, size in zip(zip(*built, strict=True), sizes, strict=True)
    )


def _check_amounts(
    prefixes: Sequence[str],
    lengths: Sequence[np.ndarray],
    matrix: Sequence[tuple[float, float] | None],
    sizes: Sequence[int],
    seq_length: int,
    without: str | None,
) -> None:
    """Refuse a split that has not one sample."""
    for name, bounds, size in zip(SPLITS, matrix, sizes, strict=True):
        for prefix, length in zip(prefixes, lengths, strict=True):
            documents, tokens = _share(length, bounds)
            if size and tokens <= seq_length:
                left_out = "" if name == "train" else f", or {without or f'ask for 0 {name} samples'}"
                raise DataError(
                    f"split: {name} gets {documents} of the {len(length)} documents of {prefix}, {tokens} tokens, "
                    f"accepted: at least {seq_length + 1} for one sample; prepare more data or change the shares"
                    f"{_working_split(lengths, sizes, seq_length)}{left_out}"
                )


def _share(lengths: np.ndarray, bounds: tuple[float, float] | None) -> tuple[int, int]:
    """Documents and tokens of a part of one data set, rounded as Megatron's builder does."""
    begin, end = (int(round(b * float(len(lengths)))) for b in bounds or (0.0, 0.0))
    return end - begin, int(lengths[begin:end].sum(dtype=np.int64))


def _working_split(lengths: Sequence[np.ndarray], sizes: Sequence[int], seq_length: int) -> str:
    """Shares that give train and every part that is asked for a sample, for an error; "" where none were found."""
    for percent in (1, 2, 5, 10, 20, 33):
        valid, test = (percent if size else 0 for size in sizes[1:])
        split = f"{100 - valid - test},{valid},{test}"
        parts = [bounds for bounds in convert_split_vector_to_split_matrix(parse_split(split)) if bounds]
        if all(_share(length, bounds)[1] > seq_length for length in lengths for bounds in parts):
            return f" ({split} works)"
    return ""
