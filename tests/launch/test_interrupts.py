"""Ctrl-C in prepare_data.py and plot.py: one line and status 130."""

import json

from launch import plot, prepare_data


def test_while_drawing(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plot, "draw", interrupted)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert plot.main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 130
    assert capsys.readouterr().err == "plot: interrupted\n"


def test_while_preparing(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "tokenize", interrupted)
    (tmp_path / "a.txt").write_text("text")
    argv = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "x"), "--tokenizer", "bytes"]
    assert prepare_data.main(argv) == 130
    assert capsys.readouterr().err == "prepare_data: interrupted; the same command continues\n"
