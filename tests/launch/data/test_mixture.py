"""Descriptions of token files, and tokens, that cannot be used: one line that names the file and
the key.
"""

import json

import numpy as np
import pytest

from launch.common.errors import DataError
from launch.data import token_files
from launch.data.blend import read_info
from launch.data.mixture import read_mixture
from tests.launch.data.test_token_files import EOS, describe, tokens, write
from tests.launch.tiny_data import train

ONE = [{"name": "a", "files": ["a.npy"]}]


@pytest.mark.parametrize(
    ("sources", "top", "message"),
    [
        ([], {}, r"sources: got \[\]"),
        ([7], {}, r"sources: got \[7\], accepted: a list of one or more objects"),
        (
            [{"name": "a", "paths": ["a.npy"]}],
            {},
            r"sources\[0\].files: got .*keys: name, weight, files",
        ),
        (
            ONE,
            {"eod": 7},
            "eod: got 7, accepted: .*keys: name, weight, files, dtype, vocab_size, eos",
        ),
        (ONE, {"eos": None}, "eos: got None"),
        (ONE, {"eos": True}, "eos: got True"),
        (ONE, {"eos": 1000}, r"vocab_size, eos: got the pairs \[\(1000, 1000\)\]"),
        (ONE, {"vocab_size": None}, "vocab_size: got None"),
        (ONE, {"dtype": "int64"}, "dtype: got 'int64', accepted: .*uint16.*uint32"),
        ([{"files": ["a.npy"]}], {}, r"sources\[0\].name: got"),
        ([*ONE, *ONE], {}, "name: got 'a' twice"),
        (
            [*ONE, {"name": "b", "files": ["./a.npy"]}],
            {},
            "files: got .*a.npy' twice, accepted: once",
        ),
        ([{**ONE[0], "weight": 0}], {}, r"sources\[0\].weight: got 0"),
        (
            [{**ONE[0], "weight": 1}, {"name": "b", "files": ["b.npy"]}],
            {},
            r"weight: got \[1.0, None\]",
        ),
        (
            [*ONE, {"name": "b", "files": ["b.npy"], "eos": 9}],
            {},
            r"eos: got the pairs \[\(1000, 7\), \(1000, 9\)\]",
        ),
        (
            [{"name": "a", "files": ["none-*.npy"]}],
            {},
            r"sources\[0\].files: .*none-\*.npy is no file",
        ),
        ([{"name": "a", "files": ["folder"]}], {}, "folder is no file"),
    ],
)
def test_a_description_that_cannot_be_used_is_refused_before_tokens_are_read(
    tmp_path, sources, top, message
):
    write(tmp_path / "a.npy", tokens(50, 1))
    write(tmp_path / "b.npy", tokens(50, 2))
    (tmp_path / "folder").mkdir()
    path = describe(tmp_path, sources, **top)
    with pytest.raises(DataError, match=message) as caught:
        read_info(path)
    assert str(caught.value).startswith(f"data: {path}: ") and "\n" not in str(caught.value)


IDS, LARGE, WIDER = [*range(10, 40), EOS], [*range(70_000, 70_030), EOS], "every second about 0"


@pytest.mark.parametrize(
    ("values", "dtype", "given", "message"),
    [
        (
            [5, 6, EOS, 5000, EOS] * 9,
            "uint16",
            "uint16",
            r"token 3 is 5000, accepted: ids from 0 to 999",
        ),
        ([5, 6, 8] * 30, "uint16", "uint16", "got eos 7, which is not among its 90 tokens"),
        (IDS, "uint32", "uint16", WIDER),
        (LARGE, "uint32", "uint16", WIDER),
        (IDS, "int64", "uint16", WIDER),
        ([*[0] * 40, *IDS], "int64", "uint16", WIDER),  # with padding
        (IDS, "int64", "uint32", WIDER),
        (
            [*range(10, 41), EOS],
            "uint16",
            "uint32",
            "token 0 is 720906, accepted: ids from 0 to 999",
        ),
        ([], "uint16", "uint16", "not among its 0 tokens"),
        ([7] * 21, "uint8", "uint16", "got 21 bytes"),
    ],
)
def test_tokens_that_cannot_be_right_are_named(tmp_path, values, dtype, given, message):
    write(tmp_path / "good.npy", tokens(50, 1), given)
    write(tmp_path / "bad.npy", values, dtype)
    path = describe(tmp_path, [{"name": "a", "files": ["good.npy", "bad.npy"]}], dtype=given)
    with pytest.raises(DataError, match=rf"data: .*mix.json: a: .*bad.npy: .*{message}"):
        train(path, 10)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(
    "values", [[0] * 400, [3, EOS] * 200, [0] * 398 + [9, EOS], [8, 0, 0, EOS] + [0, 9] * 5]
)
def test_zeros_that_ids_have_themselves_are_accepted(tmp_path, dtype, values):
    """Padding, a few ids, short files."""
    write(tmp_path / "a.npy", [*values, EOS], dtype)
    path = describe(tmp_path, [{"name": "a", "files": ["a.npy"]}], dtype=dtype)
    (index,) = token_files.build_index(read_mixture(path), tmp_path)
    assert len(np.load(index)) > 2


@pytest.mark.parametrize(
    ("name", "text"), [("mix.json", "not json"), ("mix.json", "[1]"), ("mix.yaml", "eos: [1")]
)
def test_a_file_that_is_no_description(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(
        DataError, match=f"data: {tmp_path}/{name}: .*accepted: a description"
    ) as caught:
        read_info(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    (tmp_path / "mix.json").write_text(json.dumps({"sources": ONE}))
    with pytest.raises(DataError, match="no.yaml: .*No such file"):
        read_info(str(tmp_path / "no.yaml"))


@pytest.mark.parametrize(("stored", "dtype"), [("float64", None), ("int32", "uint16")])
def test_open_tokens_refuses_a_numpy_header_of_another_type(tmp_path, stored, dtype):
    np.save(tmp_path / "a.npy", np.zeros(4, stored))
    path = describe(tmp_path, ONE, dtype=dtype)
    with pytest.raises(DataError, match=f"a.npy: got {stored} .*accepted: one dimension of uint16"):
        train(path, 10)
