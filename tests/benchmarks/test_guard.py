"""Nothing that a guarded program started is left, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import guard
from benchmarks.common import ROOT

# Stands for a launcher, that SIGTERM ends before it can end its rank, which is in a session of its own and does not
# hear SIGTERM, either.
RANK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PROGRAM = """
import pathlib, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
time.sleep({})
"""
STARTER = "import sys; from benchmarks import guard; guard.PATIENCE = 1.0; guard.start(sys.argv[1:], 600)"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A program that starts a rank, and where that says its number."""
    monkeypatch.setattr(guard, "PATIENCE", 1.0)
    return lambda seconds=600: ["-c", PROGRAM.format(seconds), str(tmp_path / "rank"), RANK]


def rank_of(tmp_path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (tmp_path / "rank").exists() and (text := (tmp_path / "rank").read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("no rank was started")


def ends(process: int) -> bool:
    """Whether it does, in the patience that guards have."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_statuses() -> None:
    assert guard.start(["-c", "import sys; sys.exit(3)"], 60) == 3
    assert guard.start(["-c", "pass"], 60) == 0
    assert guard.start(["-c", "import os; os.kill(os.getpid(), 9)"], 60) == 128 + 9


@pytest.mark.parametrize("how", ["time", "stopped", "by itself"])
def test_ranks_end_with_their_program(words, tmp_path, how) -> None:
    file = tmp_path / "rank"
    if how == "time":
        assert guard.start(words(), 10) == "time was over"
    elif how == "stopped":
        assert guard.start(words(), 60, lambda: file.exists() and bool(file.read_text())) == "time was over"
    else:
        assert guard.start(words(0), 60) == 0
    assert ends(rank_of(tmp_path))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_who_started_them(words, tmp_path, sign) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *words()], cwd=ROOT, start_new_session=True)
    try:
        rank = rank_of(tmp_path)
        os.kill(starter.pid, sign)
        assert starter.wait(60) == -sign and ends(rank)
    finally:
        starter.kill()
