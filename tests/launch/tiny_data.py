"""Small data sets for tests, whose samples tell where they come from."""

from __future__ import annotations

import json

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from launch.data.dataset import build_datasets

VOCAB = 50000


def make(prefix, documents=60, seed=0, eod=0, vocab=VOCAB, **info):
    """A data set. Every token but the last of a document is unique in a large ``vocab``, so that
    a sample tells where it is from.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 120, documents)
    tokens = 1 + rng.permutation(VOCAB - 1)[: lengths.sum()] % (vocab - 1)
    ends = np.cumsum(lengths)
    tokens[ends - 1] = eod
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for end, length in zip(ends, lengths, strict=True):
        builder.add_document(tokens[end - length : end], [int(length)])
    builder.finalize(f"{prefix}.idx")
    content = {"vocab_size": VOCAB, "eod": eod, "tokenizer_digest": "d", **info}
    with open(f"{prefix}.json", "w") as file:
        json.dump(content, file)
    return str(prefix)


def train(paths, samples, seed=7, seq=32, **options):
    options = {"split": "90,10,0", "valid_samples": 0, "test_samples": 0, **options}
    return build_datasets(
        [paths] if isinstance(paths, str) else paths,
        seq_length=seq,
        train_samples=samples,
        seed=seed,
        **options,
    )[0]


def rows(dataset, n):
    return [tuple(dataset[i]["tokens"].tolist()) for i in range(n)]
