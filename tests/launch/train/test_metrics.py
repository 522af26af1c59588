"""Reporters: metrics file, readable lines, summary, TensorBoard, DeepSpeed's monitor, traces."""

import errno
import io
import json
import os
import random
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch

from coat_dist import CoatConfigError
from launch.common import log_level
from launch.train import pretrain_options
from launch.train.metrics import Summary, read_metrics
from launch.train.reporters import Reporters, open_reporters, step_profiler
from tests.launch.pretrain_runs import REQUIRED, command, configuration, rank_main
from tests.support import run_ranks

FIXED = {
    "lr": 1e-3 / 3,
    "tokens_per_second": 1234.5,
    "tokens_per_second_per_gpu": 617.25,
    "tflops_per_gpu": 0.5,
    "step_time": 2.0,
    "peak_memory_bytes": 3 * 2**30,
}


def record(step, **more):
    return {
        "step": step,
        "loss": random.random() * 10,
        "grad_norm": random.random(),
        **FIXED,
        **more,
    }


def opened(*more, start=0, continues=True):
    return open_reporters(pretrain_options.parse([*REQUIRED, *map(str, more)]), start, continues)


def report(folder, *records, start=0, end=100):
    """Report records; the lines."""
    with redirect_stdout(io.StringIO()) as lines:
        argv = ("--output", folder, "--train-steps", 100, "--stop-at-step", end)
        writer = opened(*argv, start=start)
        for one in records:
            writer.step(one)
        writer.close()
    return lines.getvalue()


def test_one_object_a_step_with_all_digits(tmp_path):
    records = [record(i) for i in range(1, 6)]
    lines = report(tmp_path, *records).splitlines()
    assert [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == records
    assert len(lines) == 5
    parts = (
        "step   3/100",
        "lr 3.333e-04",
        "617 tokens/s/",
        "0.5 TFLOP/s/",
        "peak 3.00 GiB",
        "ETA 0:03:14",
    )
    assert all(part in lines[2] for part in parts), lines[2]
    assert "ETA 0:00:14" in report(tmp_path / "b", record(3), end=10), "that of --stop-at-step"


def test_resume_drops_what_is_repeated_and_a_cut_line(tmp_path):
    first, again = ([record(i) for i in range(*steps)] for steps in ((1, 9), (6, 8)))
    report(tmp_path, *first)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # killed here
    report(tmp_path, *again, start=5)
    assert read_metrics(tmp_path) == first[:5] + again


def test_non_finite_is_null_and_named(tmp_path):
    bad = record(
        1,
        loss=float("nan"),
        grad_norm=float("inf"),
        skipped="non-finite loss",
        valid_loss=float("nan"),
    )
    line = report(tmp_path, bad)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert (
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["loss"]
        is None
    )
    assert "SKIPPED: non-finite loss" in line and "valid loss non-finite" in line


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = opened("--tensorboard", tmp_path)
    for i in range(1, 4):
        writer.step(record(i, loss=float(i), valid_loss=2.0 * i))
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert events.Scalars("valid_loss")[2].value == 6.0


def test_steps_are_hidden_above_info(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log_level, "_level", "warning")
    Reporters(total_steps=2).step(record(1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "line"), [('{"step": 1}\nrubbish\n{"step": 2}\n', 2), ('{"loss": 1}\n', 1)]
)
def test_damaged_file_names_the_line(tmp_path, text, line):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(
        ValueError, match=f"metrics.jsonl:{line}: got .*, accepted: one JSON object a line"
    ):
        read_metrics(tmp_path)


def test_a_disk_without_room_is_an_error_of_the_option(tmp_path, monkeypatch):
    """In every file that is written, and closing afterwards does not raise again."""
    writer = opened("--output", tmp_path)
    writer.file.close()
    writer.file = open("/dev/full", "w")  # noqa: SIM115 - every flush fails with ENOSPC
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write .*No space left"):
        writer.step(record(1))
    writer.close()

    def replace(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write .*No space"):
        writer.memory(SimpleNamespace(to_dict=dict, table=str))
    with pytest.raises(CoatConfigError, match=r"^--output: cannot write .*No space"):
        opened("--output", tmp_path)


def test_summary(tmp_path):
    summary = Summary()
    for loss, more in (
        (4.0, {"valid_loss": 2.5}),
        (1.25, {"valid_loss": None}),
        (2.0, {"valid_loss": 3.0}),
    ):
        summary.add(
            record(
                summary.recorded_steps + 1,
                loss=loss,
                tokens_per_second=100.0,
                **more,
                test_loss=7.0,
            )
        )
    assert summary.to_dict(wall_seconds=9.0, ranks=2) == {
        "recorded_steps": 3,
        "tokens": 600,
        "seconds": 6.0,
        "wall_seconds": 9.0,
        "tokens_per_second": 100.0,
        "tokens_per_second_per_gpu": 50.0,
        "peak_memory_bytes": 3 * 2**30,
        "loss": 2.0,
        "best_valid_loss": 2.5,
        "best_valid_step": 1,
        "test_loss": 7.0,
    }
    assert Summary().to_dict(wall_seconds=0.0, ranks=1)["tokens_per_second"] is None
    for continues, names in ((False, ["summary.json.1"]), (True, [])):  # that of an earlier run
        folder = tmp_path / str(continues)
        folder.mkdir()
        (folder / "summary.json").write_text("{}")
        opened("--output", folder, start=1, continues=continues).close()
        assert [p.name for p in folder.glob("summary*")] == names


def test_a_run_and_its_continuation_with_trace_summary_and_deepspeeds_monitor(work, tmp_path):
    """Two ranks; stopped by a signal after step 4, continued to step 6; steps 3 to 5 are to be
    traced.
    """
    run, save = tmp_path / "run", tmp_path / "save"
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    config = configuration(tmp_path, 2, csv_monitor=monitor)
    more = ["--profile-steps", "3-5", "--save", save, "--load", "auto"]
    more += ["--eval-interval", "2", "--eval-steps", "1"]
    argv = command(work, run, config, *more, steps=6)
    end = run_ranks(2, rank_main, argv, [(4, "signal", 0)])[0]
    assert end.startswith("stopped by SIGTERM after step 4")
    first = json.loads((run / "summary.json").read_text())
    assert (first["ended"], first["step"]) == ("stopped by SIGTERM after step 4", 4)
    assert first["tokens"] == 4 * 8 * 32
    assert first["checkpoint"] == str(save / "step00000004")
    assert len((tmp_path / "monitor/Train_Samples_lr.csv").read_text().splitlines()) == 1 + 4

    assert run_ranks(2, rank_main, argv)[0].startswith("finished 6 steps")
    records, summary = read_metrics(run), json.loads((run / "summary.json").read_text())
    valid = {r["valid_loss"]: r["step"] for r in records if "valid_loss" in r}
    assert (summary["best_valid_loss"], summary["best_valid_step"]) == (
        min(valid),
        valid[min(valid)],
    )
    assert summary["tokens"] == 6 * 8 * 32
    assert summary["seconds"] == pytest.approx(sum(r["step_time"] for r in records))
    traces = sorted(p.name for p in run.glob("*trace*"))
    assert traces == ["trace-steps3-5.json", "trace-steps5-5.json"]
    events = json.loads((run / "trace-steps3-5.json").read_text())["traceEvents"]
    names = {e.get("name") for e in events}
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= names and "ProfilerStep#2" not in names


def test_the_steps_that_were_asked_for_are_profiled(tmp_path):
    def names(profiler, steps):
        with profiler:
            for _ in range(steps):
                torch.ones(1)
                profiler.step()
        return sorted(p.name for p in tmp_path.iterdir())

    assert names(step_profiler((5, 6), 9, str(tmp_path)), 3) == [], (
        "a run that continues after them"
    )
    assert names(step_profiler((5, 6), 3, str(tmp_path)), 1) == [], "a run that ends before them"
    assert names(step_profiler((5, 6), 3, str(tmp_path)), 4) == ["trace-steps5-6.json"]
