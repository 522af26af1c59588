"""Branches of one run: they continue its very state, a BF16 one to the bit, and what they are
compared with.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.convergence import branches, runs
from benchmarks.convergence.branch_report import KEYS, by_trunk, noise, report
from benchmarks.convergence.flow import BF16, TINY, Job, pretrain, settings
from launch import prepare_data, to_universal
from launch.train.metrics import read_metrics
from tests.support import run_ranks

STEPS, AT = 6, 3


def program(rank: int, world: int, name: str, words: list[str]) -> None:
    """One of the programs that a study starts, in a process group that exists."""
    torch.set_num_threads(1)
    if name == "launch/to_universal.py":
        assert to_universal.main(words) == 0
    elif name == "benchmarks/convergence/branch_run.py":
        from benchmarks.convergence import branch_run

        branch_run.main(words)
    else:
        from launch.pretrain import train
        from launch.train import pretrain_options
        from launch.train.plan import plan

        train(plan(pretrain_options.parse(words), 1), torch.device("cpu"))


@contextmanager
def in_a_rank(line, log, gpus):
    at = next(i for i, word in enumerate(line) if word.startswith(("launch/", "benchmarks/")))
    Path(log).write_text("")
    run_ranks(1, program, line[at], list(line[at + 1 :]))
    yield SimpleNamespace(wait=lambda seconds: 0)


@pytest.fixture
def call(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(runs, "launched", in_a_rank)
    monkeypatch.setattr(branches, "launched", in_a_rank)
    data = str(tmp_path / "text")
    given = [
        "--input",
        str(ROOT / "benchmarks"),
        "--glob",
        "*.py",
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
        "--quiet",
    ]
    assert prepare_data.main([*given, "--output", data]) == 0

    def call(*more: str, finished: bool = True) -> dict:
        given = [
            "--tiny",
            "--steps",
            str(STEPS),
            "--branch-at",
            str(AT),
            "--average",
            "3",
            "--data",
            data,
        ]
        given += ["--folder", str(tmp_path / "kept"), "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["branches", *given, *more])
        with (
            nullcontext()
            if finished
            else pytest.raises(SystemExit, match="^error: none of . runs was finished")
        ):
            branches.main()
        return json.loads((tmp_path / "convergence/branches-tiny.json").read_text())

    call.arguments = branches.parse(
        ["--tiny", "--steps", str(STEPS), "--branch-at", str(AT), "--average", "3"]
    )
    call.data = data
    return call


def test_branches_continue_the_trunk_to_the_bit(
    call, tmp_path, monkeypatch, capsys, refused
) -> None:
    kept: list = []
    real = runs.measured

    def measured(line, out, *rest):
        found = real(line, out, *rest)
        kept.append(read_metrics(out))
        return found

    monkeypatch.setattr(branches, "measured", measured)
    found = call("--runs", "bf16:0:0", "bf16:0:1", "fp8 moments, row scales:0:0", "--nudge", "0.1")
    assert not found["failed"] and [len(records) for records in kept] == [
        AT,
        STEPS - AT,
        STEPS - AT,
        STEPS - AT,
    ]

    # A run that was never cut is the trunk and, behind it, the branch.
    config, out = tmp_path / "whole.json", tmp_path / "whole"
    config.write_text(json.dumps(settings(BF16, TINY)))
    line = pretrain(Job(BF16, 0, 0), TINY, call.data, config, out, call.arguments)
    run_ranks(1, program, "launch/pretrain.py", line)
    whole = read_metrics(out)
    for key in "loss", "lr", "grad_norm", "consumed_samples":
        assert [r[key] for r in whole] == [r[key] for records in kept[:2] for r in records]
    first, nudged, coat = found["runs"]
    assert first["held_out_loss"] == whole[-1]["valid_loss"] and first["steps"] == STEPS
    assert first["bf16_held_out_loss"] == first["held_out_loss"] != first["averaged_held_out_loss"]
    assert (
        first["averaged_bf16_held_out_loss"] == first["averaged_held_out_loss"]
        and first["averaged_steps"] == 3
    )

    # All begin with the same weights, and then part.
    assert len({r["trunk"] for r in found["runs"]}) == 1
    assert first["distance"] == 0 < nudged["distance"] and coat["distance"] > 0
    assert kept[3][0]["loss"] == kept[1][0]["loss"] and kept[3][-1]["loss"] != kept[1][-1]["loss"]
    assert (
        coat["bf16_held_out_loss"]
        != coat["held_out_loss"]
        == pytest.approx(first["held_out_loss"], rel=1e-2)
    )
    (row,) = found["gaps"]
    assert (
        row["variant"] == "fp8 moments, row scales"
        and row["trunks"] == [first["trunk"]]
        and row["runs"] == [1, 2]
    )
    assert row["held_out_loss_error"] > 0 and "from repeat to repeat" in capsys.readouterr().out

    # A later call goes on: with the trunk that is kept, and with the branches of the file.
    result = tmp_path / "convergence/branches-tiny.json"
    (tmp_path / "first.json").write_text(result.read_text())
    kept.clear()
    again = call("--runs", "bf16:0:0", "bf16:0:2", "--extend", str(tmp_path / "first.json"))
    assert len(kept) == 1 and [r["variant"] for r in again["runs"]].count(BF16) == 3
    assert (
        len({r["trunk"] for r in again["runs"]}) == 1
        and "not compared" not in capsys.readouterr().out
    )
    with refused("settings.average: got 3, accepted: this call's 1"):
        call("--average", "1", "--extend", str(tmp_path / "first.json"))


def branch(variant: str, trunk: str, loss: float, **more: object) -> dict:
    return {
        "variant": variant,
        "seed": 0,
        "repeat": 0,
        "trunk": trunk,
        "steps": 9,
        "distance": 1.0,
        **dict.fromkeys(KEYS, loss),
        **more,
    }


def test_branches_are_compared_within_their_trunk(capsys) -> None:
    found = [branch(BF16, "a", 1.0), branch(BF16, "a", 1.2), branch("row scales", "a", 1.3)]
    # C: no BF16.
    found += [
        branch(BF16, "b", 2.0),
        branch("row scales", "b", 2.1),
        branch("row scales", "c", 9.0),
    ]
    found += [branch(BF16, "b", 7.0, steps=8)]  # stopped
    (row,) = by_trunk(found, 9)
    assert row["trunks"] == ["a", "b"] and row["held_out_loss"] == pytest.approx([0.2 / 1.1, 0.05])
    assert row["held_out_loss_error"] == pytest.approx((0.2 / 1.1 - 0.05) / 2)
    bf16, rows = noise(found, 9)
    assert bf16["freedom"] == 1 and bf16["held_out_loss"] == pytest.approx(0.02**0.5 / 1.4)
    assert rows["freedom"] == 0 and "held_out_loss" not in rows
    report(found, [], 9)
    assert f"held-out {0.15 / 1.55:+.3%}" in capsys.readouterr().out
