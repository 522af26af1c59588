"""The longer run: what is started, how it is stopped and goes on, and what its curves say."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import pytest

from benchmarks.common import ROOT
from benchmarks.convergence import long
from benchmarks.convergence.long_report import held_out_gaps, plot, report
from launch.model.gpt import parameter_count
from launch.train import arguments as pretrain_arguments
from launch.train.plan import plan

ARGUMENTS = argparse.Namespace(tiny=False, steps=1200, seed=0, lr=6e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["bf16", "coat"])
def test_both_train_what_the_first_lines_say_on_any_number_of_gpus(tmp_path, monkeypatch, name, ranks) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.json").write_text(json.dumps({"vocab_size": 16384, "eod": 0, "tokenizer_digest": "d"}))
    for end in ".bin", ".idx":
        (tmp_path / f"text{end}").write_bytes(b"")
    line = long.command(name, str(tmp_path / "text"), tmp_path, ranks, ARGUMENTS)
    assert line[line.index("--nproc_per_node") + 1] == str(ranks)
    p = plan(pretrain_arguments.parse(line[line.index("launch/pretrain.py") + 1 :]), ranks)
    assert p.batch.total * p.model.seq_length == 262_144 and p.batch.micro == 32
    assert 302e6 < parameter_count(p.model) < 304e6
    coat = (p.settings["optimizer"]["type"], p.coat is not None and p.coat.activation.enabled)
    assert coat == {"bf16": ("AdamW", False), "coat": ("CoatAdamW", True)}[name]
    assert p.args.load == "auto" and p.args.save


def test_gpus_are_shared_evenly() -> None:
    names = ["bf16", "coat"]
    assert long.shares(["0"], names) == [["0"], ["0"]] and long.shares(["0", "1"], names) == [["0"], ["1"]]
    assert long.shares(list("0123"), names) == [["0", "1"], ["2", "3"]]
    assert long.shares(list("0123567"), names) == [["0", "1"], ["2", "3"]]
    assert long.shares(list("012"), names[:1]) == [["0", "1"]]


# Stands for torch.distributed.run: a rank that ends when it is told to, or never.
PROGRAM = """
import subprocess, sys, time
rank = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {}); "
rank += "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
saves = "(pathlib.Path(sys.argv[1] + '-saved').touch(), sys.exit(0))"
sys.exit(subprocess.run([sys.executable, "-c", rank.format(saves), sys.argv[1]]).returncode)
"""


def test_ranks_are_asked_to_save_when_the_time_is_over(tmp_path, monkeypatch) -> None:
    ready, waits = tmp_path / "ready", []
    real = subprocess.Popen.wait

    def wait(process, seconds=None):
        waits.append(seconds)
        if len(waits) > 1:
            return real(process, seconds)
        while not ready.exists():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(process.args, seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    assert long.run([sys.executable, "-c", PROGRAM, str(ready)], tmp_path / "log", ["0"], 5.0) == 0
    assert (tmp_path / "ready-saved").exists() and waits[0] == 5.0


def metrics(folder, steps: int, factor: float) -> dict:
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": factor * (2 + 3 / step), "step_time": 0.5, "peak_memory_bytes": 2**30}
            record |= {"tokens_per_second_per_gpu": 1000.0} | ({"valid_loss": factor * 2.5} if step % 50 == 0 else {})
            file.write(json.dumps(record) + "\n")
        file.write('{"step": ')  # cut by a kill
    return long.curve(folder, 256, 1024)


def test_curves_are_drawn_as_far_as_they_go(tmp_path, capsys) -> None:
    runs = {"bf16": metrics(tmp_path / "bf16", 300, 1.0), "coat": metrics(tmp_path / "coat", 501, 1.001)}
    assert runs["bf16"]["steps"] == 300 and runs["coat"]["tokens"] == 501 * 262_144
    assert runs["coat"]["steps_a_point"] == 3 and len(runs["coat"]["training_losses"]) == 167
    assert held_out_gaps(runs) == {step: pytest.approx(0.001) for step in range(50, 301, 50)}
    report(runs, 1200)
    assert "step 300: held-out loss +0.100%" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot(runs, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 5000
    nothing = long.curve(tmp_path / "none", 256, 1024)
    report({"bf16": runs["bf16"], "coat": nothing}, 1200)
    assert "coat: no step" in capsys.readouterr().out
    with pytest.raises(ValueError, match="plot: got no step of coat"):
        plot({"bf16": runs["bf16"], "coat": nothing}, tmp_path / "none.png")


def test_a_result_stays_where_no_run_made_a_step(tmp_path, monkeypatch) -> None:
    """In this call, if it failed, or in any."""
    (tmp_path / "text.json").write_text('{"tokens": 1000, "text_bytes": 4000}')
    result = tmp_path / "convergence/long-tiny.json"
    given = ["--tiny", "--data", str(tmp_path / "text"), "--folder", str(tmp_path / "runs"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["long", *given, "--budget", "1"])
    steps, status = {"bf16": 0, "coat": 0}, 0

    def run(line, log, gpus, seconds):
        log.write_text("")
        if steps[name := log.stem] and not (log.parent / name).exists():
            metrics(log.parent / name, steps[name], 1.0)
        return status

    monkeypatch.setattr(long, "run", run)
    with pytest.raises(SystemExit, match="^error: no run made a step; the result stays as it was$"):
        long.main()
    assert not result.exists()
    steps["coat"] = 3
    long.main()
    assert json.loads(result.read_text())["runs"]["coat"]["steps"] == 3
    result.write_text("measured")
    status = 1
    with pytest.raises(SystemExit, match="^error: no run made a step"):
        long.main()
    assert result.read_text() == "measured"
    status = 0  # both are through: the result is written again
    long.main()
    assert json.loads(result.read_text())["runs"]["bf16"]["steps"] == 0
