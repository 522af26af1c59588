"""Metrics file, readable line, resume."""

import errno
import io
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from coat_dist import CoatConfigError
from launch.train.metrics import duration, read_metrics
from launch.train.reporters import Files, Lines, Reporters, TensorBoard, open_reporters


def record(step, **more):
    return {
        "step": step,
        "loss": random.random() * 10,
        "lr": 1e-3 / 3,
        "grad_norm": random.random(),
        "tokens_per_second": 1234.5,
        "tokens_per_second_per_gpu": 617.25,
        "tflops_per_gpu": 0.5,
        "step_time": 2.0,
        "peak_memory_bytes": 3 * 2**30,
        **more,
    }


def log(folder, start=0, end=None):
    stream = io.StringIO()
    return Reporters(Lines(100, end, stream), Files(folder, start, True)), stream


def test_one_object_a_step_with_all_digits(tmp_path):
    records = [record(i) for i in range(1, 6)]
    writer, stream = log(tmp_path)
    for r in records:
        writer.step(r)
    writer.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == records
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    for part in (
        "step   3/100",
        "loss ",
        "lr 3.333e-04",
        "grad norm ",
        "617 tokens/s/",
        "0.5 TFLOP/s/",
        "peak 3.00 GiB",
        "ETA 3:14",
    ):
        assert part in lines[2]


def test_the_eta_is_that_of_stop_at_step(tmp_path):
    writer, stream = log(tmp_path, end=10)
    writer.step(record(3))
    writer.close()
    assert "step   3/100 |" in stream.getvalue() and "ETA 0:14" in stream.getvalue()


def test_resume_drops_what_is_repeated_and_a_cut_line(tmp_path):
    writer, _ = log(tmp_path)
    first = [record(i) for i in range(1, 9)]
    for r in first:
        writer.step(r)
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # killed here
    writer, _ = log(tmp_path, start=5)
    again = [record(i) for i in range(6, 8)]
    for r in again:
        writer.step(r)
    writer.close()
    assert read_metrics(tmp_path) == first[:5] + again


def test_non_finite_is_null_and_named(tmp_path):
    writer, stream = log(tmp_path)
    writer.step(record(1, loss=float("nan"), grad_norm=float("inf"), skipped="non-finite loss"))
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["loss"] is None
    assert "SKIPPED: non-finite loss" in stream.getvalue()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = Reporters(TensorBoard(str(tmp_path / "tb"), 0))
    for i in range(1, 4):
        writer.step(record(i, loss=float(i), valid_loss=2.0 * i))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert events.Scalars("valid_loss")[2].value == 6.0


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    from launch.train import reporters

    options = SimpleNamespace(train_steps=3, stop_at_step=None, output=str(tmp_path), tensorboard=None, wandb=None)
    monkeypatch.setattr(reporters, "on_rank_0", lambda function: None)
    writer = open_reporters(options, 0, True, {})
    writer.step(record(1))
    writer.close()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_damaged_file_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: got 'rubbish', accepted: one JSON object a line"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:1: got"):
        read_metrics(tmp_path)


def test_a_disk_without_room_is_one_line(tmp_path, monkeypatch):
    """In every file that is written, and closing the log afterwards does not raise again."""
    files = Files(tmp_path, 0, True)
    files._file.close()
    full = Path("/dev/full")  # every flush fails with ENOSPC
    files._file, files.where = full.open("w"), str(full)
    writer = Reporters(files)
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write /dev/full \(No space left on device\)$"):
        writer.step(record(1))
    writer.close()

    def replace(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    other = Reporters(Files(tmp_path / "other", 0, True))
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write \S+/memory.json \(No space"):
        other.memory(SimpleNamespace(to_dict=dict))
    options = SimpleNamespace(train_steps=3, stop_at_step=None, output=str(tmp_path), tensorboard=None, wandb=None)
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write \S+ \(No space"):
        open_reporters(options, 0, True, {})


def test_duration():
    assert [duration(s) for s in (0, 59.4, 59.6, 3599.6, 90061)] == ["0:00", "0:59", "1:00", "1:00:00", "1d 1:01:01"]


def test_a_held_out_loss_that_is_not_finite_is_said(tmp_path):
    writer, stream = log(tmp_path)
    writer.step(record(1, valid_loss=float("nan"), test_loss=float("inf")))
    writer.close()
    assert stream.getvalue().endswith("| valid loss non-finite | test loss non-finite\n")
    assert read_metrics(tmp_path)[0]["valid_loss"] is None
