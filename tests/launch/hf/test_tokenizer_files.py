"""Tokenizers that go along with a converted model: those beside the weights, or those of ``--like``."""

from pathlib import Path

import pytest

from launch import convert_hf
from launch.data.tokenizer import train_bpe
from tests.launch.hf.folders import make

pytest.importorskip("transformers")


def test_a_folder_without_a_tokenizer_is_told(tmp_path, capsys):
    make("llama3", tmp_path / "hf")
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    assert "note: " not in capsys.readouterr().out
    assert convert_hf.main(["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "again")]) == 0
    assert f"note: no tokenizer is beside {tmp_path / 'ours'}; --like DIR takes" in capsys.readouterr().out


@pytest.mark.parametrize("ids, fits", [(300, False), (290, True)])
def test_a_tokenizer_of_more_ids_than_the_model_has_is_refused(tmp_path, capsys, ids, fits):
    make("llama3", tmp_path / "hf", vocab_size=290)
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    (tmp_path / "other").mkdir()
    train_bpe([Path(__file__).read_text(encoding="utf-8")], ids, tmp_path / "other" / "tokenizer.json")
    argv = ["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "out"), "--like", str(tmp_path / "other")]
    capsys.readouterr()
    assert convert_hf.main(argv) == (0 if fits else 2)
    said = capsys.readouterr().err
    if fits:
        assert said == "" and (tmp_path / "out" / "tokenizer.json").is_file()
    else:
        assert said == (
            f"error: --like: got {tmp_path / 'other'}, whose tokenizer.json makes 300 ids of text, accepted: that of "
            "the model, which has 290\n"
        )
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokenizer", "options", "vocab_size", "file"),
    [
        ("bpe:300", [], 300, "tokenizer.json"),
        ("sentencepiece", [], 28, "tokenizer.model"),
        ("sentencepiece", ["--eod", "27"], 28, "tokenizer.model"),
        ("bytes", [], 257, None),
    ],
)
def test_a_tokenizer_of_prepared_data(tmp_path, capsys, sentencepiece_file, tokenizer, options, vocab_size, file):
    """`--like PREFIX`, or one of its files: the tokenizer, as transformers reads it, and the end of documents."""
    import json

    import transformers

    from launch import prepare_data
    from launch.data.tokenizer import for_data

    text = " one two three four\nfive" * 3
    (tmp_path / "text.txt").write_text(text + Path(__file__).read_text(encoding="utf-8"))
    spec = f"sentencepiece:{sentencepiece_file}" if tokenizer == "sentencepiece" else tokenizer
    argv = ["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path / "data"), "--tokenizer", spec, *options]
    assert prepare_data.main([*argv, "--quiet", "--workers", "1"]) == 0
    for name, size in (("hf", vocab_size), ("small", vocab_size - 1)):
        make("llama3", tmp_path / name, vocab_size=size)
        assert convert_hf.main(["--from", str(tmp_path / name), "--to", str(tmp_path / f"{name}-ours")]) == 0
    capsys.readouterr()
    argv = ["--to", str(tmp_path / "out"), "--like", str(tmp_path / "data")]
    assert convert_hf.main(["--from", str(tmp_path / "small-ours"), *argv]) == 2
    assert capsys.readouterr().err == (
        f"error: --like: got {tmp_path / 'data'}, whose tokenizer makes {vocab_size} ids, accepted: that of the model, "
        f"which has {vocab_size - 1}\n"
    )
    assert convert_hf.main(["--from", str(tmp_path / "hf-ours"), *argv[:-1], argv[-1] + ".idx"]) == 0
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


def test_what_like_accepts_is_told(tmp_path, capsys):
    make("llama3", tmp_path / "hf")
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    argv = ["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "out"), "--like", str(tmp_path / "none")]
    capsys.readouterr()
    told = (
        f"error: --like: got {tmp_path / 'none'}, accepted: a folder with config.json or tokenizer files, or the PREFIX"
    )
    assert convert_hf.main(argv) == 2
    assert capsys.readouterr().err == f"{told} of prepared data\n"
    (tmp_path / "none.json").write_text('{"vocab_size": 9, "eod": 0}')
    assert convert_hf.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"{told} of prepared data ({tmp_path / 'none.json'}: not a summary")


def test_a_tokenizer_that_is_not_known_here_goes_along(tmp_path):
    make("llama3", tmp_path / "hf")
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.model").write_text("IQ== 0\n")  # as Meta's own of Llama 3
    argv = ["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "out"), "--like", str(tmp_path / "other")]
    assert convert_hf.main(argv) == 0
    assert (tmp_path / "out" / "tokenizer.model").is_file()


def test_what_editors_put_before_text_does_not_come_out(tmp_path):
    """Of config.json, an index of shards and the files that travel; transformers reads none with it."""
    import transformers

    mark = b"\xef\xbb\xbf"
    make("llama3", tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf" / "generation_config.json").write_text('{"do_sample": false}')
    marked = [*(tmp_path / "hf").glob("*.json")]
    assert len(marked) >= 3
    for file in marked:
        file.write_bytes(mark + file.read_bytes())
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours"), "--verify"]) == 0
    assert convert_hf.main(["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "back"), "--verify"]) == 0
    assert not [f.name for f in (tmp_path / "back").iterdir() if f.read_bytes().startswith(mark)]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all((x == y).all() for x, y in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("alone", [False, True], ids=["beside its base", "without it"])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_merged_first(tmp_path, capsys, name, alone):
    from launch.weights import open_weights
    from launch.weights.source import CheckpointError

    make("llama3", tmp_path / "hf")
    if alone:
        for file in ("config.json", "model.safetensors"):
            (tmp_path / "hf" / file).unlink()
    (tmp_path / "hf" / name).write_bytes(b"{}")
    capsys.readouterr()
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert f"{name}: holds an adapter (LoRA)" in said and "merge it first" in said and said.count("\n") == 1
    with pytest.raises(CheckpointError, match="adapter"):
        open_weights(tmp_path / "hf")


def test_a_folder_of_several_types_comes_back_as_it_was(tmp_path):
    import json

    import torch
    from safetensors.torch import load_file, save_file

    make("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    stored = load_file(file)
    stored = {n: t.float() if "k_proj" in n or "gate_proj" in n or "norm" in n else t for n, t in stored.items()}
    save_file(stored, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16", "torch_dtype": "float16"}))
    for source, target in (("hf", "ours"), ("ours", "back"), ("back", "again"), ("again", "last")):
        assert convert_hf.main(["--from", str(tmp_path / source), "--to", str(tmp_path / target), "--verify"]) == 0
        if target in ("back", "last"):
            back = load_file(tmp_path / target / "model.safetensors")
            assert {n: t.dtype for n, t in back.items()} == {n: t.dtype for n, t in stored.items()}
            assert all(torch.equal(back[n], t) for n, t in stored.items())
            written = json.loads((tmp_path / target / "config.json").read_text())
            assert written["dtype"] == "bfloat16" and "torch_dtype" not in written
    argv = ["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "half"), "--dtype", "float16"]
    assert convert_hf.main(argv) == 0
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
