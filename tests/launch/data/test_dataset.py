"""Training data: the order of samples, blends, ranks, the index cache."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from launch.common.errors import DataError
from launch.data.dataset import build_datasets
from launch.data.sampler import PretrainSampler, batches
from tests.launch.tiny_data import VOCAB, make, rows, train


def test_items(tmp_path):
    prefix = make(tmp_path / "x")
    sets = build_datasets([prefix], "80,10,10", 32, 20, 5, 0, 1)
    assert sets[2] is None and len(sets[0]) == 20 and len(sets[1]) == 5
    for item in (sets[0][3], sets[1][0]):
        assert {k: (v.dtype, tuple(v.shape)) for k, v in item.items()} == {
            "tokens": (torch.int64, (32,)),
            "labels": (torch.int64, (32,)),
            "loss_mask": (torch.float32, (32,)),
            "position_ids": (torch.int64, (32,)),
        }
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])
        assert item["loss_mask"].all() and torch.equal(item["position_ids"], torch.arange(32))
    seen = {t for split in sets[:2] for i in range(len(split)) for t in split[i]["tokens"].tolist()}
    assert len(seen) > 500
    parts = [
        {t for i in range(s.epoch_samples) for t in s[i]["tokens"].tolist()} - {0} for s in sets[:2]
    ]
    assert not parts[0] & parts[1]  # no document is in two splits


@pytest.mark.parametrize("weights", [None, [0.25, 0.75]])
def test_first_epoch_is_megatrons(tmp_path, weights):
    prefixes = [make(tmp_path / "x"), make(tmp_path / "y", seed=1)][: len(weights or "1")]
    ours = train(
        prefixes
        if weights is None
        else [f"{w} {p}" for w, p in zip(weights, prefixes, strict=True)],
        30,
        3,
    )
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=32,
        blend=(prefixes, weights),
        split="90,10,0",
        tokenizer=SimpleNamespace(vocab_size=VOCAB, eod=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        # BlendedDataset needs ranks for it.
        path_to_cache=str(tmp_path / "theirs") if weights is None else None,
    )
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [30, 0, 0], lambda: True, config).build()[0]
    assert rows(ours, 30) == rows(theirs, 30)


def test_order_does_not_depend_on_the_length_of_the_run(tmp_path):
    prefix = make(tmp_path / "x")
    one = train(prefix, 1)
    n = one.epoch_samples
    long = train(prefix, 5 * n)
    assert len(long) == 5 * n
    order = rows(long, 5 * n)
    assert rows(train(prefix, 2 * n + 3), 2 * n + 3) == order[: 2 * n + 3]
    epochs = [order[i * n : (i + 1) * n] for i in range(5)]
    # Each sample once an epoch.
    assert all(set(e) == set(epochs[0]) and len(set(e)) == n for e in epochs)
    assert len({tuple(e) for e in epochs}) == 5
    assert rows(train(prefix, 5 * n, seed=8), n) != epochs[0]
    backwards = [tuple(long[i]["tokens"].tolist()) for i in reversed(range(5 * n))]
    assert backwards == order[::-1]


def shares(dataset, samples):
    return [sum(dataset[i]["dataset_id"] == which for i in range(samples)) for which in (0, 1)]


def test_blend(tmp_path):
    a, b = make(tmp_path / "a", 40, 1), make(tmp_path / "b", 80, 2)
    for paths in ([f"0.25 {a}", f"0.75 {b}"], ["1", a, "3", b], [f"25 {a}", f"75.0  {b}"]):
        assert shares(train(paths, 400), 400) == [100, 300]
    sizes = [os.path.getsize(f"{p}.bin") for p in (a, b)]
    by_tokens = train([a, b], 300)
    assert abs(shares(by_tokens, 300)[1] - 300 * sizes[1] / sum(sizes)) <= 1
    assert rows(train([f"1 {a}", f"3 {b}"], 100), 100) == rows(
        train([f"1 {a}", f"3 {b}"], 2000), 100
    )
    batch = next(iter(batches(by_tokens, PretrainSampler(300, 0, 2, 0, 1))))
    assert set(batch) == by_tokens[0].keys() - {"dataset_id"}


def test_data_prepared_anew_is_not_read_with_the_old_index(tmp_path):
    prefix = make(tmp_path / "x", 60, 1)
    train(prefix, 10)
    fresh = make(tmp_path / "y", 30, 2)
    for suffix in (".bin", ".idx"):
        os.replace(f"{fresh}{suffix}", f"{prefix}{suffix}")
    make(tmp_path / "y", 30, 2)
    assert rows(train(prefix, 10), 10) == rows(train(str(tmp_path / "y"), 10), 10)


def test_cache_is_used_and_an_interrupted_one_is_not(tmp_path, monkeypatch):
    prefix = make(tmp_path / "x")
    expected = rows(train(prefix, 10), 10)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "x.cache").rglob("*.npy")}
    assert len(files) == 3
    assert rows(train(prefix, 77), 10) == expected  # another length of run, the same index
    assert {
        file: file.stat().st_mtime_ns for file in (tmp_path / "x.cache").rglob("*.npy")
    } == files
    real = np.save

    def dies(file, *args, **options):
        if "shuffle" in str(file):
            with open(file, "wb") as f:
                f.write(b"\x93NUMPY")
            raise KeyboardInterrupt
        real(file, *args, **options)

    monkeypatch.setattr(np, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        train(prefix, 10, cache_dir=str(tmp_path / "new"))
    monkeypatch.setattr(np, "save", real)
    assert rows(train(prefix, 10, cache_dir=str(tmp_path / "new")), 10) == expected


def test_cache_goes_elsewhere_if_the_data_cannot_be_written(tmp_path, monkeypatch):
    prefix = make(tmp_path / "x")
    expected = rows(train(prefix, 10, cache_dir=str(tmp_path / "c")), 10)
    # Permissions do not stop root.
    (tmp_path / "x.cache").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert rows(train(prefix, 10), 10) == expected
    assert len(list((tmp_path / "home/coat_dist").glob("*/*.npy"))) == 3
    with pytest.raises(DataError, match="cache_dir: cannot write to .*x.cache"):
        train(prefix, 10, cache_dir=str(tmp_path / "x.cache"))
