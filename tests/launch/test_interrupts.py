"""Ctrl-C while programs import, and in prepare_data.py and plot.py: one line and status 130, no stack."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import python_path
from launch import plot, prepare_data

ROOT = Path(__file__).parents[2]


def start(program, *argv, folder, first_import, rank="0", ignored=False):
    """A program in which Ctrl-C comes when ``first_import`` is imported."""
    body = (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nprint('went on', flush=True)\n"
    )
    (folder / f"{first_import}.py").write_text(body + "\nos._exit(0)\n")
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / f"{program}.py"), *argv],
        env={**os.environ, "PYTHONPATH": python_path(folder), "RANK": rank},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("program", "first_import"), [("pretrain", "torch"), ("prepare_data", "numpy")])
def test_while_importing(program, first_import, tmp_path):
    ended = start(program, folder=tmp_path, first_import=first_import)
    assert ended.returncode == 130 and ended.stdout == ""
    assert ended.stderr == f"{program}: interrupted before it had begun\n"


def test_other_ranks_say_nothing_and_jobs_in_the_background_go_on(tmp_path):
    ended = start("pretrain", folder=tmp_path, first_import="torch", rank="1")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
    ended = start("pretrain", folder=tmp_path, first_import="torch", ignored=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


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
