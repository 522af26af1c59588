"""Data preparation that is killed, interrupted or damaged half-way: the same command continues
to the same bytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import python_path
from launch.prepare_data import main
from tests.launch.data.prepare_runs import files_of, run, some_texts, write_jsonl

ROOT = Path(__file__).parents[2]


def environment():
    return {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONWARNINGS": "ignore"}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop_in_the_middle(command, parts, number):
    """Run a command, send it a signal once a few shards are there; its exit status and error
    output.
    """
    enough = len(list(parts.glob("0*.json"))) + 5
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores SIGINT, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 60
    while (
        len(list(parts.glob("0*.json"))) < enough
        and time.monotonic() < until
        and process.poll() is None
    ):
        time.sleep(0.001)
    if process.poll() is not None:
        return process.returncode, process.communicate()[1]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    process.wait(120)
    until = time.monotonic() + 20
    while any(alive(pid) for pid in children) and time.monotonic() < until:
        time.sleep(0.01)
    orphans = [int(pid) for pid in children if alive(pid)]
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    assert not orphans
    assert process.returncode == 0 or (
        len(children) >= 2 and len(list(parts.glob("0*.json"))) >= enough
    )
    return process.returncode, process.communicate()[1]


@pytest.mark.slow
def test_killed_run_continues_to_the_same_bytes(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", some_texts(6000, 7))
    (tmp_path / "straight").mkdir()
    common = [
        "--input",
        str(tmp_path / "in.jsonl"),
        "--tokenizer",
        "bpe:300",
        "--shard-bytes",
        "4k",
    ]
    straight = ["--output", str(tmp_path / "straight/x"), "--workers", "1", "--quiet"]
    assert main([*common, *straight]) == 0

    command = [
        sys.executable,
        "launch/prepare_data.py",
        *common,
        "--output",
        str(tmp_path / "out/x"),
        "--workers",
        "2",
    ]
    parts = tmp_path / "out/x.parts"
    for _ in range(3):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        killed = stop_in_the_middle(command, parts, signal.SIGKILL)[0]
        status, errors = stop_in_the_middle(command, parts, signal.SIGINT)
        if killed and status:
            break  # on a busy machine a run may be over before the signal
    assert (
        killed == -signal.SIGKILL
        and status == 130
        and errors.endswith("prepare_data: interrupted; the same command continues\n")
    )
    assert "Traceback" not in errors and not (tmp_path / "out/x.json").exists()
    (parts / "000001.bin.tmp12345").write_bytes(b"half written")

    again = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=180
    )
    assert again.returncode == 0, again.stderr
    assert "continuing: " in again.stdout and "6,000 documents" in again.stdout
    assert files_of(tmp_path / "out/x") == files_of(tmp_path / "straight/x") and not parts.exists()

    finished = (tmp_path / "out/x.bin").stat().st_mtime_ns
    assert main([*common, "--output", str(tmp_path / "out/x"), "--quiet"]) == 0
    assert (tmp_path / "out/x.bin").stat().st_mtime_ns == finished


@pytest.mark.parametrize("victim", ["x.bin", "x.idx", "x.json"])
def test_killed_merge_is_repeated(tmp_path, monkeypatch, victim):
    """The process dies just before this file gets its name."""
    write_jsonl(tmp_path / "in.jsonl", some_texts(50, 8))
    arguments, folder = (
        ["--input", tmp_path / "in.jsonl", "--shard-bytes", "2k"],
        tmp_path / "killed",
    )
    run(*arguments, "--output", tmp_path / "a/x")
    real = os.replace

    def die(source, target):
        if str(target) == str(folder / victim):
            raise KeyboardInterrupt
        real(source, target)

    for more in ([], ["--overwrite", "--no-append-eod"]):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "replace", die)
            run(*arguments, "--output", folder / "x", *more)
        assert not (folder / "x.json").exists()  # an old summary does not vouch for half new files
        run(*arguments, "--output", folder / "x", *more[:1])
        assert files_of(folder / "x") == files_of(tmp_path / "a/x")


@pytest.mark.parametrize("victim", ["000002.bin", "000002.npy"])
def test_damaged_shard_is_made_again(tmp_path, monkeypatch, victim):
    write_jsonl(tmp_path / "in.jsonl", some_texts(50, 8))
    arguments = ["--input", tmp_path / "in.jsonl", "--shard-bytes", "2k"]
    run(*arguments, "--output", tmp_path / "whole")
    monkeypatch.setattr(
        "launch.prepare_data.merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        run(*arguments, "--output", tmp_path / "x")
    monkeypatch.undo()
    # What a power cut may leave of a file that was renamed before.
    os.truncate(tmp_path / "x.parts" / victim, 0)
    run(*arguments, "--output", tmp_path / "x")
    assert files_of(tmp_path / "x") == files_of(tmp_path / "whole")
