"""Training data: the order of samples, resuming, ranks, blends, the index cache, errors."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from launch.data import PretrainSampler, batches, build_datasets, padded_vocab_size, parse_blend, parse_split, read_info
from launch.gpt_dataset import Identity
from launch.prep import DataError
from tests.support import run_ranks

VOCAB = 50000


def make(prefix, documents=60, seed=0, eod=0, **info):
    """A data set in which every token but the last of a document is unique, so that a sample tells where it is from."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 120, documents)
    tokens = rng.permutation(np.arange(1, VOCAB))[: lengths.sum()].astype(np.uint16)
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
        [paths] if isinstance(paths, str) else paths, seq_length=seq, train_samples=samples, seed=seed, **options
    )[0]


def rows(dataset, n):
    return [tuple(dataset[i]["tokens"].tolist()) for i in range(n)]


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
    parts = [{t for i in range(s.epoch_samples) for t in s[i]["tokens"].tolist()} - {0} for s in sets[:2]]
    assert not parts[0] & parts[1]  # no document is in two splits


def test_loss_of_what_follows_an_end_can_be_masked(tmp_path):
    dataset = train(make(tmp_path / "x"), 20, eod_mask_loss=True)
    items = [dataset[i] for i in range(20)]
    assert all(torch.equal(i["loss_mask"] == 0, i["tokens"] == 0) for i in items)
    assert any((i["loss_mask"] == 0).any() for i in items)


def test_first_epoch_is_megatrons(tmp_path):
    prefix = make(tmp_path / "x")
    ours = train(prefix, 30, seed=3)
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=32,
        blend=([prefix], None),
        split="90,10,0",
        tokenizer=Identity(VOCAB, 0, []),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(tmp_path / "theirs"),
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
    assert all(set(e) == set(epochs[0]) and len(set(e)) == n for e in epochs)  # each sample once an epoch
    assert len({tuple(e) for e in epochs}) == 5
    assert rows(train(prefix, 5 * n, seed=8), n) != epochs[0]
    backwards = [tuple(long[i]["tokens"].tolist()) for i in reversed(range(5 * n))]
    assert backwards == order[::-1]


def positions(sampler, count):
    return list(itertools.islice(iter(sampler), count))


@pytest.mark.parametrize("dp, micro", [(1, 12), (2, 6), (3, 4), (4, 1), (12, 1), (6, 2)])
@pytest.mark.parametrize("consumed", [0, 24, 84])
def test_global_batches_are_the_same_sets_for_any_layout(dp, micro, consumed):
    steps = 12 // (dp * micro)  # gradient accumulation
    ranks = [positions(PretrainSampler(100, consumed, micro, r, dp), 5 * steps) for r in range(dp)]
    for k in range(5):
        batch = [p for rank in ranks for m in rank[k * steps : (k + 1) * steps] for p in m]
        assert sorted(batch) == sorted((consumed + 12 * k + i) % 100 for i in range(12))


def test_sampler_resumes_and_wraps():
    straight = positions(PretrainSampler(10, 0, 2, 1, 2), 9)
    assert straight[:4] == [[2, 3], [6, 7], [0, 1], [4, 5]]
    for n in range(9):
        assert positions(PretrainSampler(10, 4 * n, 2, 1, 2), 9 - n) == straight[n:]
    sampler = PretrainSampler(10, 4, 2, 0, 1)
    assert positions(sampler, 3) == positions(sampler, 3)  # every iteration begins at consumed_samples


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_resume_exactly_and_leave_the_random_state_alone(tmp_path, workers):
    dataset = train(make(tmp_path / "x"), 500)
    straight = list(itertools.islice(batches(dataset, PretrainSampler(500, 0, 3, 1, 2)), 8))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rest = list(itertools.islice(batches(dataset, PretrainSampler(500, 18, 3, 1, 2), workers), 5))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(straight[3:], rest, strict=True):
        assert a.keys() == b.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        assert all(torch.equal(a[k], b[k]) and a[k].shape == (3, 32) for k in a)
    assert not torch.equal(straight[0]["tokens"], straight[1]["tokens"])


def test_validation_begins_again_each_time(tmp_path):
    valid = build_datasets([make(tmp_path / "x")], "50,50,0", 32, 1, 6, 0, 1)[1]
    sampler = PretrainSampler(6, 0, 2, 0, 1)
    first, second = (list(itertools.islice(batches(valid, sampler), 3)) for _ in range(2))
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, second, strict=True))


def of_which(dataset, n, prefixes_tokens):
    return Counter(
        next(i for i, s in enumerate(prefixes_tokens) if set(dataset[j]["tokens"].tolist()) - {0} <= s)
        for j in range(n)
    )


def tokens_of(prefix):
    return set(np.fromfile(f"{prefix}.bin", np.uint16).tolist()) | {0}


def disjoint(tmp_path):
    """Two data sets without a common token; the second has about twice the tokens."""
    a, b = make(tmp_path / "a", 40, 1), make(tmp_path / "b", 80, 1)
    for prefix, low in ((a, 0), (b, 25000)):
        tokens = np.fromfile(f"{prefix}.bin", np.uint16)
        keep = tokens == 0
        tokens = (np.arange(len(tokens)) % 24999 + 1 + low).astype(np.uint16)
        tokens[keep] = 0
        tokens.tofile(f"{prefix}.bin")
    return a, b


def test_blend(tmp_path):
    a, b = disjoint(tmp_path)
    parts = [tokens_of(a), tokens_of(b)]
    for paths in ([f"0.25 {a}", f"0.75 {b}"], ["1", a, "3", b], [f"25 {a}", f"75.0  {b}"]):
        dataset = train(paths, 400)
        counts = of_which(dataset, 400, parts)
        assert abs(counts[0] - 100) <= 1 and counts[0] + counts[1] == 400
    sizes = [os.path.getsize(f"{p}.bin") for p in (a, b)]
    counts = of_which(train([a, b], 300), 300, parts)  # without weights: by tokens
    assert abs(counts[1] - 300 * sizes[1] / sum(sizes)) <= 1
    assert rows(train([f"1 {a}", f"3 {b}"], 100), 100) == rows(train([f"1 {a}", f"3 {b}"], 2000), 100)
    item = train([a, b], 300)[0]
    assert set(next(iter(batches(train([a, b], 300), PretrainSampler(300, 0, 2, 0, 1))))) == item.keys() - {
        "dataset_id"
    }


def build_on_rank(rank, world, paths, cache):
    dataset = train(paths, 50, cache_dir=cache)
    return rows(dataset, 50)


@pytest.mark.parametrize("blend", [False, True])
def test_ranks_agree(tmp_path, blend):
    a, b = make(tmp_path / "a", 40, 1), make(tmp_path / "b", 50, 2)
    paths = [f"1 {a}", f"2 {b}"] if blend else [a]
    results = run_ranks(2, build_on_rank, paths, str(tmp_path / "cold"))
    assert results[0] == results[1] == rows(train(paths, 50, cache_dir=str(tmp_path / "other")), 50)


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
    files = sorted((tmp_path / "x.cache").iterdir())
    assert len(files) == 4
    stamps = [f.stat().st_mtime_ns for f in files]
    assert rows(train(prefix, 77), 10) == expected  # another length of run, the same index
    assert [f.stat().st_mtime_ns for f in sorted((tmp_path / "x.cache").iterdir())] == stamps
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
    (tmp_path / "x.cache").write_text("a file where the folder would be")  # permissions do not stop root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert rows(train(prefix, 10), 10) == expected
    assert len(list((tmp_path / "home/coat_dist").glob("*/*"))) == 4
    with pytest.raises(DataError, match="cache_dir: cannot write to .*x.cache"):
        train(prefix, 10, cache_dir=str(tmp_path / "x.cache"))
    (tmp_path / "home2").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home2"))
    with pytest.raises(DataError, match="cache_dir: cannot write"):
        train(prefix, 10)


def test_too_little_data(tmp_path):
    prefix = make(tmp_path / "x", 100)
    for split, words in (("99,1,0", "split: valid gets 1 of the 100 documents"), ("1,0,0", "split: valid gets 0 ")):
        with pytest.raises(DataError, match=words + r".*, \d+ tokens, accepted: at least 257"):
            build_datasets([prefix], split, 256, 10, 1, 0, 0)
    with pytest.raises(DataError, match=r"split: test gets 0 of .*ask for 0 test samples"):
        build_datasets([prefix], "9,1", 32, 10, 1, 1, 0)
    total = int(np.fromfile(f"{prefix}.bin", np.uint16).size)
    assert build_datasets([prefix], "1", total - 1, 3, 0, 0, 0)[0].epoch_samples == 1
    with pytest.raises(DataError, match=f"{total} tokens, accepted: at least {total + 1}"):
        build_datasets([prefix], "1", total, 3, 0, 0, 0)


def test_small_shares_survive(tmp_path):
    sets = build_datasets([make(tmp_path / "x", 100)], "0.00001,99.99,0.00999", 32, 0, 5, 0, 0)
    assert sets[0] is None and len(sets[1]) == 5


def test_damaged_or_foreign_files_are_named(tmp_path):
    prefix = make(tmp_path / "x")
    size = os.path.getsize(f"{prefix}.bin")
    os.truncate(f"{prefix}.bin", size - 2)
    with pytest.raises(DataError, match=f"x.bin has {size - 2} bytes, accepted: the {size} of its index"):
        train(prefix, 1)
    make(tmp_path / "x")
    os.truncate(f"{prefix}.idx", 50)
    with pytest.raises(DataError, match="x.idx .* is damaged"):
        train(prefix, 1)
    (tmp_path / "x.idx").write_bytes(b"")
    with pytest.raises(DataError, match="x.idx .* is damaged"):
        train(prefix, 1)
    (tmp_path / "x.idx").write_bytes(b"something else altogether, long enough")
    with pytest.raises(DataError, match="x.idx .* is damaged"):
        train(prefix, 1)
    with pytest.raises(DataError, match="nowhere.bin does not exist"):
        train(str(tmp_path / "nowhere"), 1)
    for content in (
        "",
        "[]",
        "{}",
        '{"vocab_size": 9}',
        '{"vocab_size": 9, "eod": null}',
        '{"vocab_size": 9, "eod": 9}',
    ):
        make(tmp_path / "x")
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(DataError, match="x.json"):
            train(prefix, 1)
    (tmp_path / "x.json").write_text('{"vocab_size": 50000, "eod": 0}')  # enough for data of Megatron's own tools
    assert read_info(prefix).eod == 0 and len(train(prefix, 1)) == 1


@pytest.mark.parametrize("info", [{"vocab_size": VOCAB + 1}, {"tokenizer_digest": "other"}])
def test_blend_of_two_tokenizers_is_refused(tmp_path, info):
    with pytest.raises(DataError, match="b was made with another tokenizer than"):
        train([make(tmp_path / "a"), make(tmp_path / "b", **info)], 5)


def test_missing_helpers(tmp_path, monkeypatch):
    prefix = make(tmp_path / "x")
    import megatron.core.datasets as package

    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers", None)
    monkeypatch.delattr(package, "helpers", raising=False)
    with pytest.raises(DataError, match="megatron-core: its compiled dataset helpers are missing"):
        train(prefix, 5)


def test_bad_arguments(tmp_path, monkeypatch):
    prefix = make(tmp_path / "x")
    for split in ("", "a", "1,b", "0,0,0", "1,1,1,1", "-1,2", "nan", "inf,1"):
        with pytest.raises(DataError, match="split: got"):
            parse_split(split)
    assert parse_split("969,30,1") == pytest.approx([0.969, 0.03, 0.001]) and parse_split("5") == [1.0, 0.0, 0.0]
    for paths in ([], ["0.5"], ["0.5", "0.5", "a"], ["0.5 a", "b"], ["0 a"], ["-1 a", "2 b"], ["nan a"], ["a", "a"]):
        with pytest.raises(DataError, match="data: got"):
            parse_blend(paths)
    assert parse_blend(["2 a b", "3 c"]) == (["a b", "c"], [2.0, 3.0])
    spaced = make(tmp_path / "7 x")
    monkeypatch.chdir(tmp_path)
    assert parse_blend(["7 x"]) == (["7 x"], None) and spaced.endswith("7 x")  # an existing file is no weight
    for options in ({"seq": 0}, {"samples": -1}):
        with pytest.raises(DataError, match="seq_length: got 0|train_samples: got -1"):
            train(prefix, **{"samples": 1, **options})
    for arguments in (
        (0, 0, 1, 0, 1),
        (1, -1, 1, 0, 1),
        (1, 0, 0, 0, 1),
        (1, 0, 1, 1, 1),
        (1, 0, 1, -1, 1),
        (1, 0, 1, 0, 0),
    ):
        with pytest.raises(DataError, match="accepted"):
            PretrainSampler(*arguments)


def test_padded_vocab_size():
    assert padded_vocab_size(257) == 384 and padded_vocab_size(32000) == 32000
    assert padded_vocab_size(257, 64, 4) == 512 and padded_vocab_size(1, 1, 1) == 1
    for arguments in ((0,), (5, 0), (5, 1, 0)):
        with pytest.raises(DataError, match="accepted: 1 or more"):
            padded_vocab_size(*arguments)
