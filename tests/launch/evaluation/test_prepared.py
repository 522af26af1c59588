"""Samples of prepared data: a part's own, each once; of a blend as many as are asked for."""

import json

import numpy as np
import pytest

from launch.evaluation.inputs import read_samples
from launch.prep import DataError


@pytest.fixture
def mixtures(tmp_path):
    """Descriptions of one and of two sources of token files, of documents of 20 tokens."""
    for name in "ab":
        tokens = np.random.default_rng(ord(name)).integers(0, 99, 2000)
        tokens[19::20] = 99
        tokens.astype(np.uint16).tofile(tmp_path / f"{name}.npy")
    for names in ("a", "ab"):
        sources = [{"name": name, "weight": 1, "files": [f"{name}.npy"]} for name in names]
        described = {"vocab_size": 100, "eos": 99, "dtype": "uint16", "sources": sources}
        (tmp_path / f"{names}.json").write_text(json.dumps(described))
    return tmp_path


def test_a_part_without_a_share(mixtures):
    given = dict(split="100,0,0", part="valid", seq_length=16, seed=1)
    with pytest.raises(
        DataError, match=r"^--split: valid gets 0 .*, or take another --part: with other"
    ):
        read_samples([str(mixtures / "a.json")], **given)


def test_samples_of_a_source_and_of_a_blend(mixtures):
    def samples(names, number):
        given = dict(split="50,50,0", part="valid", seq_length=16, seed=1, samples=number)
        return read_samples([str(mixtures / f"{names}.json")], **given)

    everything = samples("a", None)
    assert len(everything) == 62 and len(samples("a", 62)) == 62
    with pytest.raises(DataError, match="^--samples: got 63, accepted: up to 62, which valid has"):
        samples("a", 63)
    assert len(samples("ab", 100)) == 100
    with pytest.raises(DataError, match="^--samples: got None, accepted: a number"):
        samples("ab", None)
