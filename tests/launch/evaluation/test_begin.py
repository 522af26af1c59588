"""``--bos``: what is put before every text, with each kind of tokenizer."""

import pytest

from coat_dist import CoatConfigError
from launch.data.tokenizer import load
from launch.evaluation.tokens import begin_ids


@pytest.mark.parametrize(
    "given, ids", [("<s>", [1]), ("1", [1]), ("eod", [2]), ("auto", []), ("none", []), ("</s>", [2])]
)
def test_of_sentencepiece(sentencepiece_file, given, ids):
    assert begin_ids(load(f"sentencepiece:{sentencepiece_file}"), given) == ids


@pytest.mark.parametrize("given", ["<bos>", "99999"])
def test_what_is_no_token_is_named(sentencepiece_file, given):
    for spec in (f"sentencepiece:{sentencepiece_file}", "bytes"):
        with pytest.raises(CoatConfigError, match=f"--bos: got '{given}', accepted: auto, none, eod, a token"):
            begin_ids(load(spec), given)
