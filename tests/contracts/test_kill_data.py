"""Data preparation that is killed, interrupted or damaged half-way: the same command continues
to the same bytes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.common import python_path
from tests.launch.data.prepare_runs import argv, files_of, run, some_texts, write_jsonl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGINT, 130, "prepare_data: interrupted; the same command continues\n"),
    ],
)
def test_prepare_data_continues_after_a_signal(tmp_path, number, status, said):
    write_jsonl(tmp_path / "in.jsonl", some_texts(6000, 7))
    given = {"tokenizer": "bpe:300", "workers": 2}
    small = "--shard-bytes", "4k"
    run(tmp_path / "in.jsonl", tmp_path / "straight/x", *small, **given)
    words = argv(tmp_path / "in.jsonl", tmp_path / "out/x", *small, **given)
    parts = tmp_path / "out/x.parts"
    process = subprocess.Popen(
        [sys.executable, "launch/prepare_data.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores SIGINT, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while len(list(parts.glob("0*.json"))) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    workers = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.communicate(timeout=120)[1].endswith(said)
    assert process.returncode == status
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=20)[1]
    assert not (tmp_path / "out/x.json").exists()
    (parts / "000001.bin.tmp12345").write_bytes(b"half written")

    assert run(tmp_path / "in.jsonl", tmp_path / "out/x", *small, **given)["documents"] == 6000
    assert files_of(tmp_path / "out/x") == files_of(tmp_path / "straight/x")
    assert not parts.exists()
    finished = (tmp_path / "out/x.bin").stat().st_mtime_ns
    run(tmp_path / "in.jsonl", tmp_path / "out/x", *small, **given)
    assert (tmp_path / "out/x.bin").stat().st_mtime_ns == finished


@pytest.mark.parametrize("victim", ["x.bin", "x.idx", "x.json"])
def test_killed_merge_is_repeated(tmp_path, monkeypatch, victim):
    """The process dies just before this file gets its name."""
    write_jsonl(tmp_path / "in.jsonl", some_texts(50, 8))
    source, small, folder = tmp_path / "in.jsonl", ("--shard-bytes", "2k"), tmp_path / "killed"
    run(source, tmp_path / "a/x", *small)
    real = os.replace

    def die(source, target):
        if str(target) == str(folder / victim):
            raise KeyboardInterrupt
        real(source, target)

    for more in ([], ["--overwrite", "--no-append-eod"]):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "replace", die)
            run(source, folder / "x", *small, *more)
        assert not (folder / "x.json").exists()  # an old summary does not vouch for half new files
        run(source, folder / "x", *small, *more[:1])
        assert files_of(folder / "x") == files_of(tmp_path / "a/x")


@pytest.mark.parametrize("victim", ["000002.bin", "000002.npy"])
def test_damaged_shard_is_made_again(tmp_path, monkeypatch, victim):
    write_jsonl(tmp_path / "in.jsonl", some_texts(50, 8))
    source, small = tmp_path / "in.jsonl", ("--shard-bytes", "2k")
    run(source, tmp_path / "whole", *small)
    monkeypatch.setattr(
        "launch.prepare_data.merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "x", *small)
    monkeypatch.undo()
    # What a power cut may leave of a file that was renamed before.
    os.truncate(tmp_path / "x.parts" / victim, 0)
    run(source, tmp_path / "x", *small)
    assert files_of(tmp_path / "x") == files_of(tmp_path / "whole")
