"""Files that go along with a converted model: the tokenizer beside the weights, or that of data."""

import json
from pathlib import Path

import pytest
import torch

from launch import convert_hf
from launch.convert.sources import open_weights
from launch.convert.weights import CheckpointError
from launch.data.tokenizer import for_data
from launch.model.model_config import ModelConfig
from launch.model.sizes import parameter_shapes
from tests.launch.convert.hf_folders import SMALL, Given, convert, fails, make
from tests.launch.data.prepare_runs import run

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
    folders = tmp_path / "hf", tmp_path / "again"
    convert(*folders)
    assert (
        f"note: no tokenizer is beside {tmp_path / 'hf'}: copy its files" in capsys.readouterr().out
    )
    (tmp_path / "hf" / name).write_text("{}")
    convert(*folders, "--overwrite")
    assert "note: " not in capsys.readouterr().out and (tmp_path / "again" / name).is_file()


@pytest.mark.parametrize(
    ("tokenizer", "options", "vocab_size", "file"),
    [
        ("bpe:300", [], 300, "tokenizer.json"),
        ("sentencepiece", ["--eod", "27"], 28, "tokenizer.model"),
        ("bytes", [], 257, None),
    ],
)
def test_convert_takes_the_tokenizer_of_the_runs_data(
    tmp_path, capsys, monkeypatch, sentencepiece_file, tokenizer, options, vocab_size, file
):
    """As transformers reads it, and the end of documents; none of data with more ids."""
    text = " one two three four\nfive" * 3
    (tmp_path / "text.txt").write_text(text + Path(__file__).read_text(encoding="utf-8"))
    spec = f"sentencepiece:{sentencepiece_file}" if tokenizer == "sentencepiece" else tokenizer
    data = str(tmp_path / "data")
    run(tmp_path / "text.txt", data, *options, tokenizer=spec)
    ours = for_data(data)
    for size in (vocab_size - 1, vocab_size):
        out = tmp_path / f"out{size}"
        model = ModelConfig(**SMALL, vocab_size=size)
        tensors = {n: torch.ones(shape) for n, shape in parameter_shapes(model).items()}
        given = Given(model, tensors, manifest={"run": {"data": {"paths": [data]}}})
        monkeypatch.setattr(convert_hf, "open_weights", lambda *_, given=given, **__: given)
        convert("x", out)
        said = capsys.readouterr().out
        assert ("note: no tokenizer" in said) == (file is None or size < vocab_size)
        end = json.loads((out / "config.json").read_text())["eos_token_id"]
        assert end == (None if size < vocab_size else ours.eod)
    if file is None:
        assert not list(out.glob("tokenizer*"))
        return
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == ours.eod
    assert (out / file).read_bytes() == (tmp_path / f"data.{file}").read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(text).input_ids == ours.encode(text) and theirs.eos_token_id == ours.eod


def test_byte_order_marks_do_not_come_out(tmp_path):
    """Of config.json, an index of shards and the files that travel; transformers reads none with
    it.
    """
    mark = b"\xef\xbb\xbf"
    make("llama3", tmp_path / "hf", shard="20KB")
    (tmp_path / "hf" / "generation_config.json").write_text('{"do_sample": false}')
    for file in (tmp_path / "hf").glob("*.json"):
        file.write_bytes(mark + file.read_bytes())
    convert(tmp_path / "hf", tmp_path / "back", "--verify")
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
