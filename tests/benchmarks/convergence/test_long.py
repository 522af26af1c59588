"""The longer run: what is started, how it is stopped and goes on, and what its curves say."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.common import ROOT
from benchmarks.convergence import long
from benchmarks.convergence.long_report import held_out_gaps, plot, report
from launch.model.gpt import parameter_count
from launch.train import pretrain_options as pretrain_arguments
from launch.train.plan import plan

ARGUMENTS = argparse.Namespace(tiny=False, steps=1200, seed=0, lr=6e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", long.VARIANTS)
def test_both_train_what_the_first_lines_say_on_any_number_of_gpus(
    tmp_path, monkeypatch, name, ranks
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.json").write_text(
        json.dumps({"vocab_size": 16384, "eod": 0, "tokenizer_digest": "d"})
    )
    for end in ".bin", ".idx":
        (tmp_path / f"text{end}").write_bytes(b"")
    line = long.command(name, str(tmp_path / "text"), tmp_path, ranks, ARGUMENTS)
    assert line[line.index("--nproc_per_node") + 1] == str(ranks)
    p = plan(pretrain_arguments.parse(line[line.index("launch/pretrain.py") + 1 :]), ranks)
    assert p.batch.total * p.model.seq_length == 262_144 and p.batch.micro == 32
    assert 302e6 < parameter_count(p.model) < 304e6
    coat = (p.settings["optimizer"]["type"], p.coat is not None and p.coat.activation.enabled)
    moments, flow = "coat" in name or name == "moments", "coat" in name or name == "flow"
    assert coat == ("CoatAdamW" if moments else "AdamW", flow) and (p.args.lr == 6e-4) != (
        "again" in name
    )
    assert p.args.load == "auto" and p.args.save


def metrics(folder, steps: int, factor: float) -> dict:
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": factor * (2 + 3 / step),
                "step_time": 0.5,
                "peak_memory_bytes": 2**30,
            }
            record |= {"tokens_per_second_per_gpu": 1000.0} | (
                {"valid_loss": factor * 2.5} if step % 50 == 0 else {}
            )
            file.write(json.dumps(record) + "\n")
        file.write('{"step": ')  # cut by a kill
    return long.curve(folder, 256, 1024)


def test_curves_are_drawn_as_far_as_they_go(tmp_path, capsys) -> None:
    runs = {
        "bf16": metrics(tmp_path / "bf16", 300, 1.0),
        "coat": metrics(tmp_path / "coat", 501, 1.001),
    }
    assert runs["bf16"]["steps"] == 300 and runs["coat"]["tokens"] == 501 * 262_144
    assert runs["coat"]["steps_a_point"] == 3 and len(runs["coat"]["training_losses"]) == 167
    assert held_out_gaps(runs) == {step: pytest.approx(0.001) for step in range(50, 301, 50)}
    report(runs | {"coat again": metrics(tmp_path / "coat again", 300, 1.001)}, 300)
    assert "last quarter, held out: coat again 2.5025, +0.100%" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot({"seed 0": runs, "seed 1": runs}, tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 5000
    nothing = long.curve(tmp_path / "none", 256, 1024)
    report({"bf16": runs["bf16"], "coat": nothing}, 1200)
    assert "coat: no step" in capsys.readouterr().out
    with pytest.raises(ValueError, match="plot: got no step of coat"):
        plot({"seed 0": {"bf16": runs["bf16"], "coat": nothing}}, tmp_path / "none.png")
