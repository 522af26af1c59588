"""Runs of a study: names, gaps, results that are extended, and runs that fail or do not end."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from benchmarks.convergence import branches
from benchmarks.convergence.branch_report import KEYS, gaps, plot, report
from benchmarks.convergence.flow import (
    BF16,
    FULL,
    NEEDED,
    SAME,
    VARIANTS,
    Job,
    check_text,
    earlier,
    pretrain,
)
from benchmarks.convergence.runs import RunFailed, measured

SETTINGS = {"steps": 500, "lr": 1e-3, "tiny": True}


def result(job: Job, loss: float | None, steps: int = 500, trunk: str | None = None) -> dict:
    return {
        **job._asdict(),
        **dict.fromkeys(KEYS, loss),
        "steps": steps,
        "losses": [2.0],
        "last_training_losses": 2.0,
        "trunk": trunk or f"of seed {job.seed}",
        "seconds": 1.0,
        "step_seconds": 0.1,
        "distance": None,
    }


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.json").write_text('{"tokens": 1000000}')
    return str(tmp_path / "text")


def test_gaps_are_means_over_trunks_of_means_over_repeats(capsys) -> None:
    runs = [
        result(Job(BF16, 0, 0), 1.0),
        result(Job(BF16, 0, 1), 1.2),
        result(Job(BF16, 1, 0), 0.9),
    ]
    runs += [result(Job("row scales", seed, 0), loss) for seed, loss in enumerate((1.3, 1.1, 9.0))]
    runs += [result(Job("tensor scales, quantized", 0, 0), 5.0, steps=400)]
    runs += [result(Job("tensor scales, quantized", 1, 0), None)]
    (row,) = gaps(runs, 500)  # no run of quantized is complete, and trunk 2 has no BF16 branch
    assert (
        row["variant"] == "row scales"
        and row["trunks"] == ["of seed 0", "of seed 1"]
        and row["runs"] == [2, 3]
    )
    assert row["held_out_loss_gap"] == pytest.approx(((1.3 - 1.1) + (1.1 - 0.9)) / 2 / 1.0)
    # One pair of repeats, 0.1 from their mean: variance 0.02 of a run; means of 1, 2, 1 and 1 runs,
    # over two trunks.
    assert row["held_out_loss_error"] == pytest.approx((0.02 * 3.5 / 4) ** 0.5)
    assert gaps([r for r in runs if not r["repeat"]], 500)[0]["held_out_loss_error"] is None
    report(runs[:-1], [{**Job("row scales", 3, 0)._asdict(), "why": "no disk"}], 500)
    printed = capsys.readouterr().out
    assert (
        "held-out +20.000% ± 13.229%" in printed and "seed 3 repeat 0  FAILED: no disk" in printed
    )


def test_a_repeat_changes_the_learning_rate_alone(tmp_path, data) -> None:
    arguments = argparse.Namespace(**SETTINGS)
    lines = [
        pretrain(Job(BF16, 0, r), FULL, data, tmp_path / "c", tmp_path / "o", arguments)
        for r in (0, 2)
    ]
    (at,) = [i for i, (a, b) in enumerate(zip(*lines, strict=True)) if a != b]
    assert lines[0][at - 1] == "--lr" and float(lines[1][at]) == pytest.approx(1.00002e-3, rel=1e-9)


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
        (
            {"runs": [result(Job("exact", 0, 0), 1.0)]},
            "variant: got 'exact', accepted: 'bf16', 'row scales'",
        ),
        (
            {
                "runs": [
                    {k: v for k, v in result(Job(BF16, 0, 0), 1.0).items() if k != "held_out_loss"}
                ]
            },
            'runs: got runs without "held_out_loss"',
        ),
        ({"tokens": 999}, "data.tokens: got 999, accepted: this call's 1000000"),
    ],
)
def test_other_runs_than_these_are_not_extended(tmp_path, changes, message) -> None:
    path = earlier_result(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"--extend: {path}: {message}"):
        check_text(path, earlier(path, SETTINGS, VARIANTS, SAME, NEEDED), 1_000_000)


def a_study(folder, data, todo, extended=None):
    given = [
        "--steps",
        "500",
        "--branch-at",
        "5",
        "--average",
        "4",
        "--lr",
        "1e-3",
        "--tiny",
        "--data",
        data,
    ]
    arguments = branches.parse(
        [*given, "--output", str(folder), "--extend", str(folder / "earlier.json")]
    )
    return branches.Study(todo, extended, data, folder, arguments)


def test_others_go_on_after_a_failure(tmp_path, data, monkeypatch, capsys) -> None:
    def fake(study, job, gpu):
        if job.variant == "tensor scales, quantized":
            raise RunFailed("exit 2, after 0 steps\nthe end of its log")
        if job.variant == "tensor scales, fp8 attention":
            raise OSError("no disk")
        return result(job, 1.0)

    monkeypatch.setattr(branches.Study, "train", fake)
    todo = [
        Job(v, 0, 0) for v in ("tensor scales, quantized", "tensor scales, fp8 attention", BF16)
    ]
    study = a_study(tmp_path, data, todo, earlier(earlier_result(tmp_path), SETTINGS, VARIANTS))
    study.work("0")
    written = json.loads((tmp_path / "convergence/branches-tiny.json").read_text())
    assert written["extended"] == {
        "environment": {"commit": "1234567"},
        "settings": SETTINGS,
        "note": "by hand",
    }
    assert [r["variant"] for r in written["runs"]] == [BF16, "row scales"]
    assert written["gaps"][0]["held_out_loss_gap"] == pytest.approx(0.1)
    assert [f["why"] for f in written["failed"]] == ["exit 2, after 0 steps", "OSError('no disk')"]
    assert "the end of its log" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [1, 20, 500, 2000])
def test_plot_of_short_runs_and_of_one_variant(tmp_path, steps) -> None:
    def run(variant, seed):
        return result(Job(variant, seed, 0), 1.0, steps) | {"losses": [2.0] * min(steps, 200)}

    plt = pytest.importorskip("matplotlib.pyplot")
    for i, runs in enumerate(
        ([run(BF16, 0)], [run(BF16, 0), run("row scales", 0), run("row scales", 1)])
    ):
        plot(runs, steps, tmp_path / f"{i}.png", 0)
        assert (tmp_path / f"{i}.png").stat().st_size > 1000
        drawn = [line.get_ydata() for axis in plt.gcf().axes for line in axis.lines[:2]]
        # Equal losses: no gap.
        assert len(drawn) == 2 * (i + 1) and all(len(y) and not any(y) for y in drawn)
    with pytest.raises(ValueError, match=f"plot: got no run of {steps} steps with one of bf16"):
        plot([run("row scales", 1)], steps, tmp_path / "none.png", 0)


# Stands for torch.distributed.run: a rank in a session of its own; logs two steps and then waits,
# exits, or ends.
PROGRAM = """
import json, pathlib, subprocess, sys, time
out, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
print("a line of the log", flush=True)
if ending == "wait":
    sleeps = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
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


def program(folder, ending, wait=None):
    out = folder / ending
    line = [sys.executable, "-c", PROGRAM, str(out), ending]
    return measured(line, out, folder / "log", "", None if wait is None else 7.0, wait)


def test_how_a_run_ends(tmp_path) -> None:
    assert program(tmp_path, "end")["held_out_loss"] == 1.5
    with pytest.raises(RunFailed, match="exit 3, after 2 steps\na line of the log"):
        program(tmp_path, "fail")
