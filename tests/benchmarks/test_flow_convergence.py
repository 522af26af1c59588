"""The paired training of the flow: order, pairing, and what becomes of runs that fail or do not end."""

from __future__ import annotations

import argparse
import json
import sys
import time

import pytest

from benchmarks import flow_convergence
from benchmarks.flow_convergence import BF16, FULL, LAST, NUDGED, VARIANTS, RunFailed, Study, command, gaps, jobs, train

ARGUMENTS = argparse.Namespace(
    steps=500, lr=1e-3, tiny=True, budget=None, per_gpu=1, output=None, data=None, variants=[BF16], seeds=[0], paired=[]
)


def result(variant: str, seed: int, losses: list[float], held_out: float | None) -> dict:
    return {
        "variant": variant, "seed": seed, "steps": len(losses), "losses": losses, "held_out_loss": held_out,
        "seconds": 1.0, "step_seconds": 0.1,
    }  # fmt: skip


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.json").write_text('{"tokens": 1000000}')
    return str(tmp_path / "text")


def test_the_most_important_runs_come_first() -> None:
    expected = [(BF16, 0), ("exact", 0), (BF16, 1), ("exact", 1), ("row scales", 0), ("quantized", 0)]
    expected += [("exact, e5m2 gradients", 0), ("fp8 attention", 0), (NUDGED, 0)]
    assert jobs(list(VARIANTS), [0, 1], [BF16, "exact"]) == expected


def test_runs_are_compared_at_steps_that_both_have() -> None:
    long = [3.0] * 400 + [2.0] * 100
    runs = [result(BF16, 0, long, 1.0), result("exact", 0, [3.3] * 400, None), result(BF16, 1, long, 2.0)]
    runs.append(result("exact", 1, [2.2] * 500, 2.02))
    stopped, whole = gaps(runs)[2:]
    assert stopped["compared_at_step"] == 400 and stopped["last_training_losses_gap"] == pytest.approx(0.1)
    assert "held_out_loss_gap" not in stopped
    assert whole["held_out_loss_gap"] == pytest.approx(0.01)
    assert whole["last_training_losses_gap"] == pytest.approx(2.2 / 2.5 - 1)  # of LAST = 200 steps, half at 2
    assert LAST == 200 and gaps(runs[1:2])[0].get("compared_at_step") is None


def test_how_often_data_are_read(data) -> None:
    found = flow_convergence.tokens(data, FULL, 100)
    assert found["tokens"] == 1_000_000 and found["training_tokens"] == 100 * 32768
    assert found["training_epochs"] == pytest.approx(3276800 / 960_000)


def test_a_nudge_changes_the_learning_rate_alone(tmp_path, data) -> None:
    lines = [command(v, 0, data, tmp_path / "c", tmp_path / "o", ARGUMENTS) for v in (BF16, NUDGED)]
    (at,) = [i for i, (a, b) in enumerate(zip(*lines, strict=True)) if a != b]
    assert lines[0][at - 1] == "--lr" and float(lines[1][at]) == pytest.approx(1.00001e-3, rel=1e-9)
    assert flow_convergence.settings(BF16, FULL) == flow_convergence.settings(NUDGED, FULL)


def test_others_go_on_after_a_failure(tmp_path, data, monkeypatch, capsys) -> None:
    def fake(variant, *_):
        if variant == "quantized":
            raise RunFailed("exit 2, after 0 steps\nthe end of its log")
        if variant == "fp8 attention":
            raise OSError("no disk")
        return result(variant, 0, [1.0] * 10, 1.0)

    monkeypatch.setattr(flow_convergence, "train", fake)
    arguments = argparse.Namespace(**{**vars(ARGUMENTS), "output": str(tmp_path)})
    study = Study([("quantized", 0), ("fp8 attention", 0), (BF16, 0), ("exact", 0)], data, tmp_path, arguments)
    study.work("0")
    written = json.loads((tmp_path / "flow-convergence.json").read_text())
    assert [r["variant"] for r in written["runs"]] == [BF16, "exact"]
    assert [f["why"] for f in written["failed"]] == ["exit 2, after 0 steps", "OSError('no disk')"]
    assert "the end of its log" in capsys.readouterr().out


# Stands for torch.distributed.run: a rank of its own that logs two steps and then waits, exits, or ends.
PROGRAM = """
import json, pathlib, subprocess, sys, time
out, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
print("a line of the log", flush=True)
if ending == "wait":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (out.parent / "pid").write_text(str(child.pid))
out.mkdir()
with open(out / "metrics.jsonl", "w") as f:
    for loss in (3.0, 2.0):
        f.write(json.dumps({"loss": loss, "step_time": 0.5, "valid_loss": 1.5}) + "\\n")
    f.write('{"loss": 1')
if ending == "wait":
    time.sleep(600)
sys.exit(3 if ending == "fail" else 0)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    def prepare(ending: str) -> None:
        monkeypatch.setattr(
            flow_convergence,
            "command",
            lambda variant, seed, data, config, out, arguments: [sys.executable, "-c", PROGRAM, str(out), ending],
        )

    return prepare


def test_a_run_that_does_not_end_is_stopped_with_its_rank(tmp_path, data, program) -> None:
    program("wait")
    run = train(BF16, 0, "", data, tmp_path, ARGUMENTS, 8.0)
    assert run["losses"] == [3.0, 2.0] and run["step_seconds"] == 0.5 and run["seconds"] < 60
    stat, deadline = f"/proc/{(tmp_path / 'pid').read_text()}/stat", time.monotonic() + 10
    while _alive(stat) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(stat)


def test_how_a_run_ends(tmp_path, data, program) -> None:
    program("end")
    assert train("exact", 0, "", data, tmp_path, ARGUMENTS, None)["held_out_loss"] == 1.5
    program("fail")
    with pytest.raises(RunFailed, match="exit 3, after 2 steps\na line of the log"):
        train("exact", 1, "", data, tmp_path, ARGUMENTS, None)


def _alive(stat: str) -> bool:
    try:
        with open(stat) as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
