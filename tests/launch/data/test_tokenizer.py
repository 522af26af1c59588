"""Tokenizers: exact round trips, text that spells special tokens, end-of-document ids,
fingerprints, errors.
"""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from launch.common.errors import DataError
from launch.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    HuggingFaceTokenizer,
    bpe_size,
    load,
    train_bpe,
)
from tests.launch.data.prepare_runs import text_of

TEXT = ["def f(x):\n    return x + 1\n", "naïve café – 東京 🙂\r\n\t", "aaaa bbbb aaaa bbbb " * 20]


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXT, 300, file)
    return file


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = (
        tokenizer.encode(text)
        if text.isascii()
        else tokenizer.encode(text.encode(errors="replace").decode())
    )
    assert max(ids, default=0) < 256 < tokenizer.vocab_size
    assert text_of(tokenizer, [*ids, tokenizer.eod]).encode() == bytes(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_round_trip_is_exact_for_any_text(bpe_file, text):
    tokenizer = load(f"hf:{bpe_file}")
    ids = tokenizer.encode(text)
    assert text_of(tokenizer, ids) == text
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for i in ids)


def test_bpe_has_the_size_asked_for_and_is_the_same_each_time(tmp_path, bpe_file):
    train_bpe(TEXT, 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe_file.read_bytes()
    assert load(f"hf:{bpe_file}").vocab_size == 300
    assert len(load(f"hf:{bpe_file}").encode("aaaa bbbb")) < 9


@pytest.mark.parametrize("text", [END_OF_TEXT, f"a{END_OF_TEXT}b", f"{END_OF_TEXT}{END_OF_TEXT}\n"])
def test_text_that_spells_the_end_token_stays_text(bpe_file, text):
    tokenizer = load(f"hf:{bpe_file}")
    ids = tokenizer.encode(text)
    assert tokenizer.eod not in ids and text_of(tokenizer, ids) == text


def test_truncation_padding_and_template_of_the_file_are_ignored(tmp_path, bpe_file):
    library = Library.from_file(str(bpe_file))
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=7)
    library.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps"
    assert load(f"hf:{tmp_path}").encode(text) == load(f"hf:{bpe_file}").encode(text)


def test_vocab_size_covers_ids_above_holes(tmp_path, bpe_file):
    content = json.loads(bpe_file.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(f"hf:{tmp_path}")
    assert tokenizer.vocab_size == 901 and len(vocabulary) == 300
    assert max(tokenizer.encode(" ".join(TEXT) + last)) < 901


def test_end_of_document_id(tmp_path, bpe_file):
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    digit = load(f"hf:{tmp_path}").encode("5")[0]
    assert digit != 5
    assert HuggingFaceTokenizer(tmp_path).eod == 0
    assert HuggingFaceTokenizer(tmp_path, "a").eod == load(f"hf:{tmp_path}").encode("a")[0]
    assert HuggingFaceTokenizer(tmp_path, "5").eod == 5  # digits are an id
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert HuggingFaceTokenizer(tmp_path).eod == load(f"hf:{bpe_file}").encode("b")[0]
    with pytest.raises(DataError, match=r"--eod: got '300', .*below 300"):
        HuggingFaceTokenizer(tmp_path, 300)
    with pytest.raises(DataError, match=r"--eod: got '<nope>'"):
        load(f"hf:{tmp_path}", "<nope>")


def test_no_end_token(tmp_path, bpe_file):
    content = json.loads(bpe_file.read_text().replace(END_OF_TEXT, "<|odd|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load(f"hf:{tmp_path}", "<|odd|>").eod == 0
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab ba ab aab bba"] * 20),
        model_writer=model,
        vocab_size=8,
        eos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "m.model").write_bytes(model.getvalue())
    for spec in (f"hf:{tmp_path}", f"sentencepiece:{tmp_path / 'm.model'}"):
        with pytest.raises(DataError, match="--eod: got nothing"):
            load(spec)


def test_sentencepiece(sentencepiece_file):
    tokenizer = load(f"sentencepiece:{sentencepiece_file}")
    ids = tokenizer.encode("three four nine")
    assert text_of(tokenizer, [*ids, tokenizer.eod]) == "three four nine"
    assert tokenizer.eod == 2 and tokenizer.eod not in tokenizer.encode("</s> one")
    assert load(f"sentencepiece:{sentencepiece_file}", "1").eod == 1
    assert [tokenizer.token_id(token) for token in ("<s>", "</s>", "<unk>", "zzz")] == [
        1,
        2,
        0,
        None,
    ]
    with pytest.raises(DataError, match="--eod: got 'zzz'"):
        load(f"sentencepiece:{sentencepiece_file}", "zzz")


def test_fingerprint_follows_content_and_end(tmp_path, bpe_file):
    first = load(f"hf:{bpe_file}")
    (tmp_path / "copy.json").write_bytes(bpe_file.read_bytes())
    assert load(f"hf:{tmp_path / 'copy.json'}").fingerprint() == first.fingerprint()
    assert load(f"hf:{bpe_file}", 5).fingerprint() != first.fingerprint()
    assert ByteTokenizer().fingerprint() != first.fingerprint()


@pytest.mark.parametrize(
    "spec", ["bpee:300", "hf:", "hf:/nowhere/at/all", "sentencepiece:/nowhere"]
)
def test_unknown_tokenizers(spec):
    with pytest.raises(DataError, match="--tokenizer: got .*, accepted: "):
        load(spec)


def test_broken_files(tmp_path):
    for name, kind in (("tokenizer.json", "hf"), ("x.model", "sentencepiece")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(DataError, match=f"--tokenizer: got .*{name}, accepted: "):
            load(f"{kind}:{tmp_path / name}")


def test_sizes_of_a_bpe():
    assert bpe_size("bpe:257") == 257 and bpe_size("bytes") is None and bpe_size("hf:bpe") is None
    for spec in ("bpe:", "bpe:256", "bpe:-1", "bpe:1e4", "bpe:300x"):
        with pytest.raises(DataError, match="from 257"):
            bpe_size(spec)
