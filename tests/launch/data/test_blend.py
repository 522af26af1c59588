"""Training data that cannot be used: too little, damaged, foreign; arguments out of range."""

from __future__ import annotations

import os

import numpy as np
import pytest

from launch.common.errors import DataError
from launch.data.blend import parse_blend, parse_split
from launch.data.dataset import build_datasets
from tests.launch.tiny_data import VOCAB, make, train


def test_too_little_data(tmp_path):
    prefix = make(tmp_path / "x", 100)
    for split, words in (
        ("99,1,0", "split: valid gets 1 of the 100 documents"),
        ("1,0,0", "split: valid gets 0 "),
    ):
        with pytest.raises(DataError, match=words + r".*, \d+ tokens, accepted: at least 257"):
            build_datasets([prefix], split, 256, 10, 1, 0, 0)
    with pytest.raises(DataError, match=r"split: test gets 0 of .*ask for 0 test samples"):
        build_datasets([prefix], "9,1", 32, 10, 1, 1, 0)
    total = int(np.fromfile(f"{prefix}.bin", np.uint16).size)
    assert build_datasets([prefix], "1", total - 1, 3, 0, 0, 0)[0].epoch_samples == 1
    with pytest.raises(DataError, match=f"{total} tokens, accepted: at least {total + 1}"):
        build_datasets([prefix], "1", total, 3, 0, 0, 0)
    # Small shares are not rounded to 0.
    sets = build_datasets([prefix], "0.00001,99.99,0.00999", 32, 0, 5, 0, 0)
    assert sets[0] is None and len(sets[1]) == 5


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("x.bin", lambda file: os.truncate(file, file.stat().st_size - 2)),
        ("x.idx", lambda file: os.truncate(file, 50)),
        ("x.idx", lambda file: file.write_bytes(b"")),
        ("x.idx", lambda file: file.write_bytes(b"something else altogether, long enough")),
        ("x.json", lambda file: file.write_text("[]")),
        ("x.json", lambda file: file.write_text('{"vocab_size": 9}')),
        ("x.json", lambda file: file.write_text('{"vocab_size": 9, "eod": null}')),
        ("x.json", lambda file: file.unlink()),
        ("x.bin", lambda file: file.unlink()),
    ],
)
def test_damaged_or_foreign_files_are_named(tmp_path, name, damage):
    prefix = make(tmp_path / "x")
    damage(tmp_path / name)
    with pytest.raises(DataError, match=f"data: .*{name}.* accepted: "):
        train(prefix, 1)


def test_train_refuses_a_blend_of_two_vocabularies(tmp_path):
    with pytest.raises(DataError, match="b was made with another tokenizer than"):
        train([make(tmp_path / "a"), make(tmp_path / "b", vocab_size=VOCAB + 1)], 5)


@pytest.mark.parametrize("split", ["", "a", "1,b", "0,0,0", "1,1,1,1", "-1,2", "nan", "inf,1"])
def test_splits_refused(split):
    with pytest.raises(DataError, match="split: got"):
        parse_split(split)


@pytest.mark.parametrize(
    "paths", [[], ["0.5 a", "b"], ["0 a"], [""], ["-1 a", "2 b"], ["nan a"], ["a", "a"]]
)
def test_blends_refused(paths):
    with pytest.raises(DataError, match="data: got"):
        parse_blend(paths)


def test_splits_and_blends_accepted():
    assert parse_split("969,30,1") == pytest.approx([0.969, 0.03, 0.001]) and parse_split("5") == [
        1.0,
        0.0,
        0.0,
    ]
    assert parse_blend(["2 a b", "3 c"]) == (["a b", "c"], [2.0, 3.0])
