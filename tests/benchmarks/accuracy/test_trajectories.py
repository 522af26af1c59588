"""The trajectories study measures what it says."""

import json
import sys

import pytest
import torch

from benchmarks.accuracy import trajectories
from benchmarks.accuracy.trajectories import Options, compare, decaying, ratios, sparse, stopped, train


def test_ratios_by_hand():
    found = ratios(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 1.0]))
    assert found["moved"] == 2.0 and found["error"] == pytest.approx(5**0.5)
    assert ratios(torch.ones(3), torch.ones(3)) == {"moved": 1.0, "error": 0.0}


def test_scenarios_are_what_they_are_called():
    gradients, watched = stopped(512, small=0.5, steps=9)
    assert (gradients[:5, watched] == 0.5).all() and (gradients[5:, watched] == 0).all()
    assert (gradients[:, ~watched] != 0).all() and 0.05 < watched.float().mean() < 0.15
    assert (stopped(512, constant=True, steps=9).steps[:, ~watched] == 1).all()
    assert 0.01 < (sparse(512, steps=50).steps != 0).float().mean() < 0.03
    gradients, watched = decaying(512, factor=0.5, steps=9)
    assert 2**-9 < gradients[8, watched].square().mean().sqrt() < 2**-7
    assert gradients[8, ~watched].square().mean().sqrt() > 0.5


def test_a_range_is_that_of_the_first_moment_and_the_packages_is_half_of_f_squared():
    steps = stopped(256, steps=6).steps
    package, half, wide = (train(steps, Options(factor=factor)) for factor in (None, 0.5, 2.0))
    assert all(torch.equal(a, b) for a, b in zip(package, half, strict=True))
    assert not torch.equal(wide[0], half[0])
    assert all(torch.equal(a, b) for a, b in zip(wide[1:], half[1:], strict=True))  # fp32 AdamW's, and second moments


def test_main_writes_every_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trajectories, "SCENARIOS", {"stopped": lambda: stopped(256, steps=7)})
    monkeypatch.setattr(trajectories, "configurations", lambda: [Options(), Options("int8", "log8", factor=None)])
    monkeypatch.setattr(sys, "argv", ["trajectories", "--output", str(tmp_path)])
    trajectories.main()
    rows = json.loads((tmp_path / "accuracy/trajectories.json").read_text())["rows"]
    assert [r["formats"] for r in rows] == ["e4m3, e4m3, R = F^2/2", "int8, log8"]
    assert rows[0]["moved"] == compare(stopped(256, steps=7), Options())["moved"]
    assert "displacement at most" in capsys.readouterr().out
