"""Files that go along with a converted model: those beside the weights, or those of ``--like``."""

import json
from pathlib import Path

import pytest

from launch import convert_hf, prepare_data
from launch.convert.source import CheckpointError
from launch.convert.weights import open_weights
from launch.data.tokenizer import for_data
from tests.launch.convert.hf_folders import fails, make

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "name", ["tekken.json", "sentencepiece.bpe.model", "qwen.tiktoken", "tokenizer.model.v3"]
)
def test_tokenizers_of_other_names_go_along(tmp_path, capsys, name):
    """A ``tokenizer_config.json`` alone does not count as a tokenizer."""
    make("llama3", tmp_path / "hf")
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
    argv = [
        "--from",
        str(tmp_path / "hf"),
        "--to",
        str(tmp_path / "again"),
        "--format",
        "hugging-face",
        "--overwrite",
    ]
    assert convert_hf.main(argv) == 0
    assert (
        f"note: no tokenizer is beside {tmp_path / 'hf'}; --like DIR takes"
        in capsys.readouterr().out
    )
    (tmp_path / "hf" / name).write_text("{}")
    assert convert_hf.main(argv) == 0
    assert "note: " not in capsys.readouterr().out and (tmp_path / "again" / name).is_file()


@pytest.mark.parametrize(
    ("tokenizer", "options", "vocab_size", "file"),
    [
        ("bpe:300", [], 300, "tokenizer.json"),
        ("sentencepiece", ["--eod", "27"], 28, "tokenizer.model"),
        ("bytes", [], 257, None),
    ],
)
def test_a_tokenizer_of_prepared_data(
    tmp_path, capsys, sentencepiece_file, tokenizer, options, vocab_size, file
):
    """`--like PREFIX`, or one of its files: the tokenizer, as transformers reads it, and the end
    of documents.
    """
    text = " one two three four\nfive" * 3
    (tmp_path / "text.txt").write_text(text + Path(__file__).read_text(encoding="utf-8"))
    spec = f"sentencepiece:{sentencepiece_file}" if tokenizer == "sentencepiece" else tokenizer
    argv = [
        "--input",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "data"),
        "--tokenizer",
        spec,
        *options,
    ]
    assert prepare_data.main([*argv, "--quiet", "--workers", "1"]) == 0
    for name, size in (("hf", vocab_size), ("small", vocab_size - 1)):
        make("llama3", tmp_path / name, vocab_size=size)
        assert (
            convert_hf.main(
                ["--from", str(tmp_path / name), "--to", str(tmp_path / f"{name}-ours")]
            )
            == 0
        )
    like = ["--like", str(tmp_path / "data")]
    err = fails(capsys, tmp_path / "small-ours", tmp_path / "out", *like)
    assert f"--like: got {tmp_path / 'data'} with {vocab_size} ids, accepted: at most" in err
    argv = [
        "--from",
        str(tmp_path / "hf-ours"),
        "--to",
        str(tmp_path / "out"),
        "--like",
        str(tmp_path / "data.idx"),
    ]
    assert convert_hf.main(argv) == 0
    ours = for_data(tmp_path / "data")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == ours.eod
    assert ("note: no tokenizer" in capsys.readouterr().out) == (file is None)
    if file is None:
        assert not list((tmp_path / "out").glob("tokenizer*"))
        return
    assert (tmp_path / "out" / file).read_bytes() == (tmp_path / f"data.{file}").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text).input_ids == ours.encode(text) and theirs.eos_token_id == ours.eod


def test_like_neither_a_folder_nor_data(sharded, tmp_path, capsys):
    err = fails(capsys, sharded / "ours", tmp_path / "out", "--like", str(tmp_path / "none"))
    assert (
        f"--like: got {tmp_path / 'none'}, accepted: a folder with config.json or tokenizer files, "
        "or the PRE" in err
    )


def test_byte_order_marks_do_not_come_out(tmp_path):
    """Of config.json, an index of shards and the files that travel; transformers reads none with
    it.
    """
    mark = b"\xef\xbb\xbf"
    make("llama3", tmp_path / "hf", shard="20KB")
    (tmp_path / "hf" / "generation_config.json").write_text('{"do_sample": false}')
    for file in (tmp_path / "hf").glob("*.json"):
        file.write_bytes(mark + file.read_bytes())
    for source, target in (("hf", "ours"), ("ours", "back")):
        assert (
            convert_hf.main(
                ["--from", str(tmp_path / source), "--to", str(tmp_path / target), "--verify"]
            )
            == 0
        )
    assert not [f.name for f in (tmp_path / "back").iterdir() if f.read_bytes().startswith(mark)]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize("alone", [False, True], ids=["beside its base", "without it"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_merged_first(tmp_path, capsys, name, alone):
    make("llama3", tmp_path / "hf")
    if alone:
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "hf" / file).unlink()
    (tmp_path / "hf" / name).write_bytes(b"{}")
    err = fails(capsys, tmp_path / "hf", tmp_path / "ours")
    assert f"{name}: holds an adapter (LoRA)" in err and "merge it first" in err
    with pytest.raises(CheckpointError, match="adapter"):
        open_weights(tmp_path / "hf")
