"""Ctrl-C while programs import, and in prepare_data.py and plot.py: one line and status 130, no stack; ``| head``."""

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


@pytest.mark.parametrize(
    ("program", "first_import"),
    [
        ("pretrain", "torch"),
        ("prepare_data", "numpy"),
        ("index_tokens", "numpy"),
        ("to_universal", "torch"),
        ("plot", "torch"),
    ],
)
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


PROGRAMS = sorted(path.stem for path in (ROOT / "launch").glob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize(
    ("program", "more"),
    [*((program, {}) for program in PROGRAMS), ("pretrain", {"PYTHONUNBUFFERED": "1"}), ("pretrain", {"2>&1": "1"})],
)
def test_a_reader_that_leaves_ends_nothing(program, more, tmp_path):
    """``program | head -1``: the work is done to the end, without a word about the pipe."""
    body = "import os, sys\nfor n in range(20000):\n    print(n)\nprint('to stderr', file=sys.stderr)\n"
    for name in ("torch", "numpy"):  # whichever it imports first
        (tmp_path / f"{name}.py").write_text(body + "os.system('echo x')\nopen('done', 'w').close()\nsys.exit(3)\n")
    reads, writes = os.pipe()
    os.close(reads)
    with (tmp_path / "err").open("wb") as errors:
        ended = subprocess.run(
            [sys.executable, str(ROOT / "launch" / f"{program}.py")],
            env={**os.environ, "PYTHONPATH": python_path(tmp_path), **more},
            stdout=writes, stderr=writes if "2>&1" in more else errors, cwd=tmp_path, timeout=120,
        )  # fmt: skip
    os.close(writes)
    assert ended.returncode == 3 and (tmp_path / "done").exists()
    assert (tmp_path / "err").read_text() == ("" if "2>&1" in more else "to stderr\n")


def test_a_pipe_that_is_read_gets_everything():
    code = "from launch import interrupts; interrupts.leave_quietly('x'); import sys; "
    code += "print('ä' * 100000, end=''); print('b', file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True, cwd=ROOT, timeout=120)
    assert (ended.stdout.decode(), ended.stderr, ended.returncode) == ("ä" * 100000, b"b\n", 0)


@pytest.mark.parametrize("program", ["pretrain", "finetune"])
def test_imports_that_take_long_are_said(program, tmp_path):
    """After five seconds, which the first import does not wait for here."""
    (tmp_path / "torch.py").write_text(
        "import os, threading\n(timer,) = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]\n"
        "assert timer.interval == 5 and timer.daemon\ntimer.function()\nos._exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(ROOT / "launch" / f"{program}.py")],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path), "RANK": "0"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("", "importing torch, Megatron-core and DeepSpeed ...\n")
