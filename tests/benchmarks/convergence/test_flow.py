"""The paired training of the flow: order, pairing, and what becomes of runs that fail or do not end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import pytest

from benchmarks.convergence import flow as flow_convergence
from benchmarks.convergence.flow import FULL, RUNS, VARIANTS, Job, RunFailed, Study, command, train
from benchmarks.convergence.flow_data import earlier
from benchmarks.convergence.flow_report import BF16, gaps, plot, report

ARGUMENTS = argparse.Namespace(
    steps=500, lr=1e-3, tiny=True, budget=None, per_gpu=1, output=None, data=None, extend=None, runs=[]
)


def result(job: Job, held_out: float | None, steps: int = 500) -> dict:
    return {
        **job._asdict(), "steps": steps, "losses": [2.0], "last_training_losses": 2.0, "held_out_loss": held_out,
        "seconds": 1.0, "step_seconds": 0.1,
    }  # fmt: skip


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.json").write_text('{"tokens": 1000000}')
    return str(tmp_path / "text")


def test_names_of_runs() -> None:
    assert Job.parse("tensor scales, e5m2 gradients:3:2") == Job("tensor scales, e5m2 gradients", 3, 2)
    assert Job.parse("bf16:1") == Job(BF16, 1, 0) and Job.parse("bf16") == Job(BF16, 0, 0)
    for wrong in ("bf17:0", "bf16:x", "bf16:0:1:2", "bf16:-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="VARIANT:SEED:REPEAT"):
            Job.parse(wrong)
    assert len(set(RUNS)) == len(RUNS)


def test_gaps_are_means_over_seeds_of_means_over_repeats(capsys) -> None:
    runs = [result(Job(BF16, 0, 0), 1.0), result(Job(BF16, 0, 1), 1.2), result(Job(BF16, 1, 0), 0.9)]
    runs += [
        result(Job("row scales", 0, 0), 1.3),
        result(Job("row scales", 1, 0), 1.1),
        result(Job("row scales", 2, 0), 9.0),
    ]
    runs += [
        result(Job("tensor scales, quantized", 0, 0), 5.0, steps=400),
        result(Job("tensor scales, quantized", 1, 0), None),
    ]
    (row,) = gaps(runs, 500)  # of quantized no run is whole, of row scales seed 2 there is no BF16
    assert row["variant"] == "row scales" and row["seeds"] == [0, 1] and row["runs"] == [2, 3]
    assert row["held_out_loss_gap"] == pytest.approx(((1.3 - 1.1) + (1.1 - 0.9)) / 2 / 1.0)
    # One pair of repeats, 0.1 from their mean: variance 0.02 of a run; means of 1, 2, 1 and 1 runs, over two seeds.
    assert row["held_out_loss_error"] == pytest.approx((0.02 * 3.5 / 4) ** 0.5)
    assert gaps([r for r in runs if not r["repeat"]], 500)[0]["held_out_loss_error"] is None
    report(runs, [{**Job("row scales", 3, 0)._asdict(), "why": "no disk"}], 500)
    printed = capsys.readouterr().out
    assert "held-out +20.000% ± 13.229%" in printed and "seed 3 repeat 0  FAILED: no disk" in printed


def test_how_often_data_are_read(data) -> None:
    found = flow_convergence.tokens(data, FULL, 100)
    assert found["tokens"] == 1_000_000 and found["training_tokens"] == 100 * 32768
    assert found["training_epochs"] == pytest.approx(3276800 / 960_000)


def test_a_repeat_changes_the_learning_rate_alone(tmp_path, data) -> None:
    lines = [command(Job(BF16, 0, r), data, tmp_path / "c", tmp_path / "o", ARGUMENTS) for r in (0, 2)]
    (at,) = [i for i, (a, b) in enumerate(zip(*lines, strict=True)) if a != b]
    assert lines[0][at - 1] == "--lr" and float(lines[1][at]) == pytest.approx(1.00002e-3, rel=1e-9)


SETTINGS = {"steps": 500, "lr": 1e-3, "tiny": True}


def earlier_result(folder, **changes):
    """A file for --extend; the settings and the text can be others than this call's."""
    found = {
        "environment": {"commit": "1234567"},
        "settings": SETTINGS | {k: v for k, v in changes.items() if k in SETTINGS},
        "data": {"tokens": changes.get("tokens", 1_000_000)},
        "runs": changes.get("runs", [result(Job("row scales", 0, 0), 1.1)]),
        "note": "by hand",
    }
    (folder / "earlier.json").write_text(json.dumps(found))
    return folder / "earlier.json"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 20}, "settings.steps: got 20, accepted: this call's 500"),
        ({"lr": 6e-4}, "settings.lr: got 0.0006, accepted: this call's 0.001"),
        ({"tiny": False}, "settings.tiny: got false, accepted: this call's true"),
        ({"runs": [result(Job("exact", 0, 0), 1.0)]}, "variant: got 'exact', accepted: 'bf16', 'row scales'"),
        (
            {"runs": [{k: v for k, v in result(Job(BF16, 0, 0), 1.0).items() if k != "held_out_loss"}]},
            'runs: got runs without "held_out_loss"',
        ),
        ({"tokens": 999}, "data.tokens: got 999, accepted: this call's 1000000"),
    ],
)
def test_other_runs_than_these_are_not_extended(tmp_path, data, monkeypatch, refused, changes, message) -> None:
    path, begun = earlier_result(tmp_path, **changes), []
    monkeypatch.setattr(flow_convergence, "train", lambda *a: begun.append(a))
    given = ["--extend", str(path), "--steps", "500", "--lr", "1e-3", "--tiny", "--data", data, "--output"]
    monkeypatch.setattr(sys, "argv", ["flow", *given, str(tmp_path)])
    with refused(f"error: --extend: {path}: {message}"):
        flow_convergence.main()
    assert not begun


def test_a_file_that_is_no_result_is_not_extended(tmp_path) -> None:
    (tmp_path / "layer.json").write_text('{"settings": {"layers": 4}}')
    (tmp_path / "text.json").write_text("no json")
    for name, why in ("layer", "a result of this program"), ("text", "a result of"), ("nothing", "a readable file"):
        with pytest.raises(ValueError, match=f"--extend: got .*{name}.json, accepted: {why}"):
            earlier(tmp_path / f"{name}.json", SETTINGS, VARIANTS)


def test_a_run_that_is_asked_for_twice_runs_once(tmp_path, data, monkeypatch) -> None:
    begun = []
    monkeypatch.setattr(flow_convergence, "train", lambda job, *_: begun.append(job) or result(job, 1.0, steps=20))
    path = earlier_result(tmp_path, steps=20)
    given = ["--extend", str(path), "--steps", "20", "--lr", "1e-3", "--tiny", "--data", data, "--output"]
    runs = ["--runs", "bf16:0", "row scales:0", "bf16", "bf16:0:1"]
    monkeypatch.setattr(sys, "argv", ["flow", *given, str(tmp_path), *runs])
    flow_convergence.main()
    assert sorted(begun) == [Job(BF16, 0, 0), Job(BF16, 0, 1)]


@pytest.mark.parametrize("steps", [1, 20, 500, 2000])
def test_plot_of_short_runs_and_of_one_variant(tmp_path, steps) -> None:
    def run(variant, seed):
        return result(Job(variant, seed, 0), 1.0, steps) | {"losses": [2.0] * min(steps, 200)}

    plt = pytest.importorskip("matplotlib.pyplot")
    for i, runs in enumerate(([run(BF16, 0)], [run(BF16, 0), run("row scales", 0), run("row scales", 1)])):
        plot(runs, steps, tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000
        drawn = [line.get_ydata() for axis in plt.gcf().axes for line in axis.lines[:2]]
        assert len(drawn) == 2 * (i + 1) and all(len(y) and not any(y) for y in drawn)  # equal losses: no gap
    with pytest.raises(ValueError, match=f"plot: got no run of {steps} steps with one of bf16"):
        plot([run("row scales", 1)], steps, tmp_path / "none.png")


def test_others_go_on_after_a_failure(tmp_path, data, monkeypatch, capsys) -> None:
    def fake(job, *_):
        if job.variant == "tensor scales, quantized":
            raise RunFailed("exit 2, after 0 steps\nthe end of its log")
        if job.variant == "tensor scales, fp8 attention":
            raise OSError("no disk")
        return result(job, 1.0)

    monkeypatch.setattr(flow_convergence, "train", fake)
    arguments = argparse.Namespace(**{**vars(ARGUMENTS), "output": str(tmp_path)})
    todo = [Job(v, 0, 0) for v in ("tensor scales, quantized", "tensor scales, fp8 attention", BF16)]
    extended = earlier(earlier_result(tmp_path), vars(arguments), VARIANTS)
    study = Study(todo, extended, data, tmp_path, arguments)
    study.work("0")
    written = json.loads((tmp_path / "convergence/flow-tiny.json").read_text())
    assert written["extended"] == {"environment": {"commit": "1234567"}, "settings": SETTINGS, "note": "by hand"}
    assert [r["variant"] for r in written["runs"]] == [BF16, "row scales"]
    assert written["gaps"][0]["held_out_loss_gap"] == pytest.approx(0.1)
    assert [f["why"] for f in written["failed"]] == ["exit 2, after 0 steps", "OSError('no disk')"]
    assert "the end of its log" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, 19])
def test_a_result_stays_where_no_run_is_finished(tmp_path, data, monkeypatch, steps) -> None:
    """One that is stopped is not compared, so it is as good as none."""

    def train(job, *_):
        if not steps:
            raise RunFailed("stopped by --budget before its first step, after 0 steps")
        return result(job, None, steps)

    def call(*runs):
        given = ["--steps", "20", "--lr", "1e-3", "--tiny", "--data", data, "--output", str(tmp_path), "--runs"]
        monkeypatch.setattr(sys, "argv", ["flow", *given, *runs])
        flow_convergence.main()

    path = tmp_path / "convergence/flow-tiny.json"
    monkeypatch.setattr(flow_convergence, "train", train)
    with pytest.raises(SystemExit, match="^error: none of 2 runs was finished$"):
        call("bf16:0", "bf16:1")
    assert len(json.loads(path.read_text())["failed" if not steps else "runs"]) == 2, "there was none to keep"
    path.write_text("measured")
    with pytest.raises(SystemExit, match=f"^error: none of 2 runs was finished; {path} stays as it was$"):
        call("bf16:0", "bf16:1")
    assert path.read_text() == "measured"
    monkeypatch.setattr(flow_convergence, "train", lambda job, *a: train(job, *a) if job.seed else result(job, 1.0, 20))
    call("bf16:1", "bf16:0")
    found = json.loads(path.read_text())
    assert len(found["runs"]) + len(found["failed"]) == 2 and found["runs"][0]["steps"] == 20


# Stands for torch.distributed.run: a rank in a session of its own; logs two steps and then waits, exits, or ends.
PROGRAM = """
import json, pathlib, subprocess, sys, time
out, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
print("a line of the log", flush=True)
if ending == "wait":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (out.parent / "pid").write_text(str(child.pid))
out.mkdir()
with open(out / "metrics.jsonl", "w") as f:
    for loss in (3.0, 2.0):
        f.write(json.dumps({"loss": loss, "step_time": 0.5, "valid_loss": 1.5}) + "\\n")
    f.write('{"loss": 1')
if ending == "wait":
    (out.parent / "waits").touch()
    time.sleep(600)
sys.exit(3 if ending == "fail" else 0)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    def prepare(ending: str) -> None:
        monkeypatch.setattr(
            flow_convergence,
            "command",
            lambda job, data, config, out, arguments: [sys.executable, "-c", PROGRAM, str(out), ending],
        )

    return prepare


def test_a_run_that_does_not_end_is_stopped_with_its_rank(tmp_path, data, program) -> None:
    def wait(process, seconds):
        while not (tmp_path / "waits").exists():
            assert process.poll() is None
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(process.args, seconds)

    program("wait")
    run = train(Job(BF16, 0, 0), "", data, tmp_path, ARGUMENTS, 7.0, wait)
    assert run["losses"] == [3.0, 2.0] and run["step_seconds"] == 0.5
    stat, deadline = f"/proc/{(tmp_path / 'pid').read_text()}/stat", time.monotonic() + 10
    while _alive(stat) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(stat)


def test_how_a_run_ends(tmp_path, data, program) -> None:
    program("end")
    assert train(Job("row scales", 0, 0), "", data, tmp_path, ARGUMENTS, None)["held_out_loss"] == 1.5
    program("fail")
    with pytest.raises(RunFailed, match="exit 3, after 2 steps\na line of the log"):
        train(Job("row scales", 1, 0), "", data, tmp_path, ARGUMENTS, None)


def _alive(stat: str) -> bool:
    try:
        with open(stat) as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
