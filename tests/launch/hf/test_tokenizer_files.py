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


def test_a_tokenizer_that_is_not_known_here_goes_along(tmp_path):
    make("llama3", tmp_path / "hf")
    assert convert_hf.main(["--from", str(tmp_path / "hf"), "--to", str(tmp_path / "ours")]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.model").write_text("IQ== 0\n")  # as Meta's own of Llama 3
    argv = ["--from", str(tmp_path / "ours"), "--to", str(tmp_path / "out"), "--like", str(tmp_path / "other")]
    assert convert_hf.main(argv) == 0
    assert (tmp_path / "out" / "tokenizer.model").is_file()
