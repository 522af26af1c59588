"""What a run leaves beside its metrics: a summary, a trace of chosen steps, a run at Weights & Biases."""

import json
import os
import sys
import types

import pytest
import torch

from coat_dist import CoatConfigError
from launch import log_level
from launch.train import arguments
from launch.train.metrics import Summary, read_metrics
from launch.train.reporters import Files, Lines, Reporters, open_reporters, step_profiler
from tests.launch.pretrain_runs import command, configuration, rank_main
from tests.support import run_ranks


def record(step, **more):
    return {
        "step": step,
        "loss": 5.0 / step,
        "step_time": 2.0,
        "tokens_per_second": 100.0,
        "peak_memory_bytes": step,
        **more,
    }


def test_summary_counts_earlier_starts_too():
    summary = Summary([record(1, valid_loss=4.0), record(2, valid_loss=2.5)])
    summary.add(record(3, peak_memory_bytes=1, valid_loss=None))
    summary.add(record(4, valid_loss=3.0, test_loss=7.0))
    assert summary.to_dict(wall_seconds=9.0, ranks=2) == {
        "recorded_steps": 4, "tokens": 800, "seconds": 8.0, "wall_seconds": 9.0, "tokens_per_second": 100.0,
        "tokens_per_second_per_gpu": 50.0, "peak_memory_bytes": 4, "loss": 1.25, "best_valid_loss": 2.5,
        "best_valid_step": 2, "test_loss": 7.0,
    }  # fmt: skip
    empty = Summary().to_dict(wall_seconds=0.0, ranks=1)
    assert empty["tokens_per_second"] is None and empty["best_valid_step"] is None


def fake_wandb(path):
    """A module that writes down how it is called."""

    def note(**what):
        with open(path, "a") as file:
            file.write(json.dumps(what) + "\n")

    class Run:
        def __init__(self, known):
            self.id = known or "made-up"
            self.summary = {}

        def log(self, numbers, step):
            note(log=numbers, step=step)

        def finish(self, exit_code):
            note(finish=exit_code, summary=self.summary)

    def init(**options):
        note(init=options)
        if options["project"] == "refused":
            raise RuntimeError("api_key not configured\nrun wandb login")
        return Run(options.get("id"))

    module = types.ModuleType("wandb")
    module.init = init
    sys.modules["wandb"] = module


def with_wandb(rank, world, argv, path, poisoned=()):
    fake_wandb(path)
    return rank_main(rank, world, argv, poisoned)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_and_its_continuation_at_wandb_with_trace_and_summary(work, tmp_path):
    """Two ranks; stopped by a signal after step 4, continued to step 6; steps 3 to 5 are to be traced."""
    config, run, save, calls = configuration(tmp_path, 2), tmp_path / "run", tmp_path / "save", tmp_path / "calls"
    asked = ["--wandb", "project", "--wandb-name", "first", "--wandb-mode", "offline", "--profile-steps", "3-5"]
    more = [*asked, "--save", save, "--load", "auto", "--eval-interval", "2", "--eval-steps", "1"]
    argv = command(work, run, config, *more, steps=6)
    end = run_ranks(2, with_wandb, argv, str(calls), [(4, "signal", 0)])[0]
    assert end.startswith("stopped by SIGTERM after step 4")
    first, (start, *logged, finish) = json.loads((run / "summary.json").read_text()), read(calls)
    assert {k: start["init"][k] for k in ("project", "name", "mode", "dir")} == {
        "project": "project", "name": "first", "mode": "offline", "dir": str(run),
    }  # fmt: skip
    assert "id" not in start["init"] and start["init"]["config"]["model"]["num_layers"] == 2
    assert [(c["step"], c["log"]["loss"]) for c in logged] == [(r["step"], r["loss"]) for r in read_metrics(run)]
    assert finish["finish"] == 0 and finish["summary"]["tokens"] == first["tokens"] == 4 * 8 * 32
    assert (first["ended"], first["step"]) == ("stopped by SIGTERM after step 4", 4)
    assert first["checkpoint"] == str(save / "step00000004")
    assert [p.name for p in run.glob("*trace*")] == ["trace-steps3-4.json"]

    assert run_ranks(2, with_wandb, argv, str(calls))[0].startswith("finished 6 steps")
    again = [c for c in read(calls) if "init" in c][1]["init"]
    assert (again["id"], again["resume"]) == ("made-up", "allow")
    records, summary = read_metrics(run), json.loads((run / "summary.json").read_text())
    assert [c["step"] for c in read(calls) if "log" in c] == [1, 2, 3, 4, 5, 6]
    valid = {r["valid_loss"]: r["step"] for r in records if "valid_loss" in r}
    assert (summary["best_valid_loss"], summary["best_valid_step"]) == (min(valid), valid[min(valid)])
    assert summary["tokens"] == 6 * 8 * 32 and summary["seconds"] == pytest.approx(sum(r["step_time"] for r in records))
    assert summary["peak_memory_bytes"] == max(r["peak_memory_bytes"] for r in records)
    assert sorted(p.name for p in run.glob("*trace*")) == ["trace-steps3-4.json", "trace-steps5.json"]
    names = {e.get("name") for e in json.loads((run / "trace-steps3-4.json").read_text())["traceEvents"]}
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= names and "ProfilerStep#2" not in names
    assert any("aten::" in str(n) for n in names)


def test_a_run_that_fails_and_one_that_wandb_refuses(work, tmp_path):
    config, calls = configuration(tmp_path, 2), tmp_path / "calls"
    traced = ["--max-bad-steps", "2", "--profile-steps", "2-5"]
    argv = command(work, tmp_path / "bad", config, "--wandb", "project", *traced, steps=6)
    end = run_ranks(1, with_wandb, argv, str(calls), [(2, "loss", 0), (3, "loss", 0)])[0]
    summary = json.loads((tmp_path / "bad" / "summary.json").read_text())
    assert (
        end.startswith("BadSteps") and summary["ended"] == "too many non-finite steps in a row" and summary["step"] == 3
    )
    assert read(calls)[-1]["finish"] == 1 and "mode" not in read(calls)[0]["init"] and summary["loss"] is None
    assert (tmp_path / "bad" / "trace-steps2-3.json").stat().st_size
    argv = command(work, tmp_path / "refused", config, "--wandb", "refused", steps=6)
    for end in run_ranks(2, with_wandb, argv, str(calls)):
        assert end == (
            "CoatConfigError: --wandb: got refused, which cannot be started (RuntimeError: api_key not configured run "
            "wandb login), accepted: after `pip install wandb` and `wandb login`, or with --wandb-mode offline"
        )


BASE = ["--deepspeed_config", "x", "--model", "y", "--data", "z", "--train-steps", "20"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--wandb-mode offline", "--wandb-mode: got 'offline', accepted: only with --wandb"),
        ("--profile-steps 10-12", "--profile-steps: got (10, 12), accepted: only with --output"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(more, message):
    with pytest.raises(CoatConfigError) as caught:
        arguments.parse([*BASE, *more.split()])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["12-10", "0", "ten", "3-"])
def test_steps_to_profile_are_a_range(capsys, wrong):
    with pytest.raises(SystemExit):
        arguments.parse([*BASE, "--profile-steps", wrong, "--output", "o"])
    assert f"--profile-steps: got '{wrong}', accepted: FIRST-LAST" in capsys.readouterr().err


@pytest.mark.parametrize("theirs", ["--wandb-project p", "--report-to wandb", "--profile", "--wandb_exp_name n"])
def test_other_programs_names(capsys, theirs):
    with pytest.raises(SystemExit):
        arguments.parse([*BASE, *theirs.split()])
    assert "no such option (did you mean --" in capsys.readouterr().err


def test_the_steps_that_were_asked_for_are_profiled(tmp_path):
    def names(profiler, steps):
        with profiler:
            for _ in range(steps):
                torch.ones(1)
                profiler.step()
        return sorted(p.name for p in tmp_path.iterdir())

    assert names(step_profiler((5, 6), 9, str(tmp_path)), 3) == [], "a run that continues after them"
    assert names(step_profiler((5, 6), 3, str(tmp_path)), 1) == [], "a run that ends before them"
    assert names(step_profiler((5, 6), 3, str(tmp_path)), 2) == ["trace-steps5.json"]
    assert names(step_profiler((5, 6), 3, str(tmp_path)), 4) == ["trace-steps5-6.json", "trace-steps5.json"]
    with pytest.raises(CoatConfigError, match="--profile-steps: cannot write .*trace-steps1.json"):
        names(step_profiler((1, 1), 0, str(tmp_path / "missing")), 1)


def test_summary_of_an_earlier_run_is_put_aside(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    for continues, names in ((False, ["summary.json.1"]), (True, [])):
        for file in tmp_path.glob("summary*"):
            file.unlink()
        (tmp_path / "summary.json").write_text("{}")
        Files(tmp_path, 1, continues).close()
        assert [p.name for p in tmp_path.glob("summary*")] == names


def test_steps_are_hidden_above_info(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("launch.log_level._level", "warning")
    log = Reporters(Lines(2), Files(tmp_path, 0, True))
    log.step({**record(1), "lr": 1.0, "grad_norm": 1.0, "tokens_per_second_per_gpu": 1.0, "tflops_per_gpu": 1.0})
    log.close()
    assert capsys.readouterr().out == "" and len(read_metrics(tmp_path)) == 1


def test_a_package_of_wandb_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import something_that_wandb_needs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(CoatConfigError) as caught:
        open_reporters(arguments.parse([*BASE, "--wandb", "project"]), 0, False, {})
    assert str(caught.value).startswith(
        "--wandb: got project, which cannot be started (ModuleNotFoundError: No module named 'something_that_wandb_"
    )


@pytest.mark.parametrize(
    ("level", "own", "seen"), [("info", None, None), ("warning", None, "true"), ("error", "false", "false")]
)
def test_log_level_silences_wandb_unless_the_user_has_said_how_much(tmp_path, monkeypatch, level, own, seen):
    monkeypatch.setitem(sys.modules, "wandb", None)  # afterwards it is as before, whatever is put there meanwhile
    fake_wandb(tmp_path / "calls")
    monkeypatch.setenv("WANDB_SILENT", own or "")
    if own is None:
        monkeypatch.delenv("WANDB_SILENT")
    monkeypatch.setattr(log_level, "_level", level)
    open_reporters(arguments.parse([*BASE, "--wandb", "project"]), 0, False, {})
    assert os.environ.get("WANDB_SILENT") == seen
