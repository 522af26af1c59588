"""Descriptions of token files, and tokens, that cannot be used: one line that names the file and the key."""

import json

import numpy as np
import pytest

from launch.data import token_files
from launch.data.blend import read_info
from launch.data.mixture import read_mixture
from launch.prep import DataError
from tests.launch.test_token_files import EOS, describe, tokens, train, write

ONE = [{"name": "a", "files": ["a.npy"]}]


@pytest.mark.parametrize(
    ("sources", "top", "message"),
    [
        ([], {}, r"sources: got \[\]"),
        (None, {"source": ONE}, "source: no such key, did you mean sources"),
        ([{"name": "a", "paths": ["a.npy"]}], {}, r"sources\[0\].paths: no such key, did you mean files"),
        (ONE, {"eod": 7}, "eod: no such key, did you mean eos"),
        (ONE, {"vocab": 7}, "vocab: no such key, did you mean vocab_size"),
        (ONE, {"eos": None}, "eos: got None, accepted: the id that ends documents, 0 to 999"),
        (ONE, {"eos": 1000}, "eos: got 1000"),
        (ONE, {"vocab_size": None}, "vocab_size: got None"),
        (ONE, {"vocab_size": 70000}, "dtype uint16 cannot hold the ids of vocab_size 70000"),
        (ONE, {"dtype": None}, "a.npy is a file of bare numbers: dtype uint16 or uint32 is needed"),
        (ONE, {"eos": [7]}, r"eos: got \[7\]"),
        (ONE, {"eos": True}, "eos: got True"),
        (ONE, {"dtype": ["uint16"]}, r"dtype: got \['uint16'\]"),
        ([7], {}, r"sources\[0\]: got 7, accepted: an object"),
        ([{"name": "a", "files": [1]}], {}, r"sources\[0\].files: got \[1\]"),
        ([{"name": "a"}], {}, r"sources\[0\].files: got None"),
        (ONE, {"dtype": "int64"}, 'dtype: got .int64., accepted: "uint16" or "uint32"'),
        ([{"files": ["a.npy"]}], {}, r"sources\[0\].name: got None"),
        ([*ONE, *ONE], {}, r"sources\[1\].name: got .a."),
        ([*ONE, {"name": "b", "files": ["./a.npy"]}], {}, "a.npy is given twice, in a and in b"),
        ([{**ONE[0], "weight": 0}], {}, r"sources\[0\].weight: got 0"),
        ([{**ONE[0], "weight": 1}, {"name": "b", "files": ["b.npy"]}], {}, "weight: got one for a, accepted"),
        ([*ONE, {"name": "b", "files": ["b.npy"], "eos": 9}], {}, r"eos: got 7 in eos, 9 in sources\[1\].eos"),
        ([{"name": "a", "files": ["none-*.npy"]}], {}, r"sources\[0\].files: none-\*.npy matches no file"),
        ([{"name": "a", "files": ["none.npy"]}], {}, r"none.npy does not exist"),
        ([{"name": "a", "files": ["folder"]}], {}, r"folder is a folder, accepted: files, or a pattern"),
        ([{"name": "a", "files": ["*n*.npy"]}], {}, "gone.npy is a link to a file that does not exist"),
        ([{"name": "a", "files": ["s3://x/a.npy"]}], {}, "local files"),
        ([{"name": "a", "files": ["odd.npy"]}], {}, r"a: .*odd.npy has 21 bytes, not a multiple of 2 \(dtype uint16\)"),
        ([{"name": "a", "files": ["empty.npy"]}], {}, "empty.npy is empty"),
        ([{"name": "a", "files": ["header.npy"]}], {}, "header.npy holds uint32, dtype says uint16"),
    ],
)
def test_a_description_that_cannot_be_used_is_refused_before_tokens_are_read(tmp_path, sources, top, message):
    write(tmp_path / "a.npy", tokens(50, 1))
    write(tmp_path / "b.npy", tokens(50, 2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone.npy").symlink_to(tmp_path / "elsewhere.npy")
    (tmp_path / "odd.npy").write_bytes(b"x" * 21)
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "header.npy", np.arange(9, dtype=np.uint32))
    path = describe(tmp_path, sources, **top)
    if sources is None:
        path = str(tmp_path / "mix.json")
        (tmp_path / "mix.json").write_text(json.dumps(top))
    with pytest.raises(DataError, match=message) as caught:
        read_info(path)
    assert str(caught.value).startswith(f"data: {path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "dtype", "given", "message"),
    [
        ([5, 6, EOS, 5000, EOS] * 9, "uint16", "uint16", r"token 3 is 5000, accepted: ids from 0 to 999"),
        ([5, 6, 8] * 30, "uint16", "uint16", "eos 7 does not occur in its 90 tokens"),
        ([*range(10, 40), EOS], "uint32", "uint16", "every second token is about 0 .* looks like uint32"),
        ([*range(70_000, 70_030), EOS], "uint32", "uint16", "every second token is about 0 .* looks like uint32"),
        (
            [*range(10, 40), EOS],
            "int64",
            "uint16",
            "three of four tokens are about 0 .* like int64, accepted: uint16 or uint32",
        ),
        ([*[0] * 40, *range(10, 40), EOS], "int64", "uint16", "looks like int64"),  # with padding
        ([*range(10, 40), EOS], "int64", "uint32", "every second token is about 0 .* looks like int64"),
        ([*range(10, 41), EOS], "uint16", "uint32", "looks like uint16"),
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
    "values", [[0] * 400, [3, EOS] * 200, [0] * 398 + [9, EOS], [9, EOS, 0], [EOS], [8, 0, 0, EOS] + [0, 9] * 5 + [EOS]]
)
def test_zeros_that_ids_have_themselves_are_accepted(tmp_path, dtype, values):
    """Padding, a few ids, short files."""
    write(tmp_path / "a.npy", [*values, EOS], dtype)
    path = describe(tmp_path, [{"name": "a", "files": ["a.npy"]}], dtype=dtype)
    (index,) = token_files.build_index(read_mixture(path), tmp_path, quiet=True)
    assert len(np.load(index)) > 2


@pytest.mark.parametrize("text", ['{"sources": 1, "sources": 2}', "not json", "[1]", '{"sources": '])
def test_a_file_that_is_no_description(tmp_path, text):
    (tmp_path / "mix.json").write_text(text)
    with pytest.raises(DataError, match=f"data: {tmp_path}/mix.json: .*accepted"):
        read_info(str(tmp_path / "mix.json"))
    (tmp_path / "mix.yaml").write_text("eos: 1\neos: 2\n")
    with pytest.raises(DataError, match="mix.yaml: .*'eos' is given twice"):
        read_info(str(tmp_path / "mix.yaml"))
    with pytest.raises(DataError, match="no.yaml: No such file"):
        read_info(str(tmp_path / "no.yaml"))
    with pytest.raises(DataError, match="which is a token file, accepted: a description"):
        read_info("part-0.npy")
