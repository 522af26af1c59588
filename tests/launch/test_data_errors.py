"""Training data that cannot be used: too little, damaged, foreign; arguments out of range."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
import pytest

from launch.data.dataset import (
    PretrainSampler,
    build_datasets,
    parse_blend,
    parse_split,
    read_info,
)
from launch.prep import DataError
from tests.launch.tiny_data import VOCAB, make, train


def test_too_little_data(tmp_path):
    prefix = make(tmp_path / "x", 100)
    for split, words in (("99,1,0", "split: valid gets 1 of the 100 documents"), ("1,0,0", "split: valid gets 0 ")):
        with pytest.raises(DataError, match=words + r".*, \d+ tokens, accepted: at least 257"):
            build_datasets([prefix], split, 256, 10, 1, 0, 0)
    with pytest.raises(DataError, match=r"split: test gets 0 of .*ask for 0 test samples"):
        build_datasets([prefix], "9,1", 32, 10, 1, 1, 0)
    with pytest.raises(DataError, match=r"split: train gets 1 of .*more data or change the shares \(100,0,0 works\)$"):
        build_datasets([prefix], "1,99", 256, 10, 0, 0, 0)
    total = int(np.fromfile(f"{prefix}.bin", np.uint16).size)
    assert build_datasets([prefix], "1", total - 1, 3, 0, 0, 0)[0].epoch_samples == 1
    with pytest.raises(DataError, match=f"{total} tokens, accepted: at least {total + 1}"):
        build_datasets([prefix], "1", total, 3, 0, 0, 0)


@pytest.mark.parametrize("documents", [3, 5, 13, 40, 100, 300])
def test_the_shares_of_the_error_work(tmp_path, documents):
    """As many as are asked for; the first that work, which are not the same for all data."""
    prefix, found = make(tmp_path / "x", documents), []
    for valid, test in ((1, 0), (1, 1), (0, 1)):
        with pytest.raises(DataError, match=r"change the shares \((\d+,\d+,\d+) works\), or ask") as refused:
            build_datasets([prefix], "1", 32, 1, valid, test, 0)
        found.append(re.search(r"\((.*) works", str(refused.value))[1])
        assert build_datasets([prefix], found[-1], 32, 1, valid, test, 0)[0] is not None
    assert [[share != "0" for share in split.split(",")[1:]] for split in found] == [[1, 0], [1, 1], [0, 1]]
    assert documents != 300 or found[0] == "99,1,0"


def test_no_shares_work_for_one_document(tmp_path):
    with pytest.raises(DataError, match="prepare more data or change the shares, or ask for 0 valid samples$"):
        build_datasets([make(tmp_path / "x", 1)], "1", 8, 1, 1, 0, 0)


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
    for paths in (
        [],
        ["0.5"],
        ["0.5", "0.5", "a"],
        ["0.5 a", "b"],
        ["0 a"],
        [""],
        ["-1 a", "2 b"],
        ["nan a"],
        ["a", "a"],
    ):
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
