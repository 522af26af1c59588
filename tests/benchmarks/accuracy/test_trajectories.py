"""The trajectories study measures what it says."""

import json
import sys
from itertools import pairwise

import pytest
import torch

from benchmarks.accuracy import trajectories
from benchmarks.accuracy.trajectories import (
    FORMER,
    Joined,
    Options,
    Trained,
    measure,
    ratios,
    train,
)
from benchmarks.accuracy.trajectory_gradients import (
    Gradients,
    changing_scale,
    decaying,
    heavy_tailed,
    normal,
    one_sided,
    sparse,
    stopped,
)


def test_ratios_by_hand():
    found = ratios(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 1.0]))
    assert found["moved"] == 2.0 and found["error"] == pytest.approx(5**0.5)
    assert ratios(torch.ones(3), torch.ones(3)) == {"moved": 1.0, "error": 0.0}


def test_measures_by_hand():
    """Of the watched elements, and second moments that fp32 does not hold normally are left out."""
    watched = torch.tensor([True, True, False, True])
    trained = Trained(
        torch.tensor([2.0, 0.5, 9.0, 1.0]),
        torch.ones(4),
        torch.tensor([4.0, 0.5, 9.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0, 1e-40]),
    )
    found = measure(trained, Gradients(torch.zeros(1, 4), watched, stops=True))
    assert found["nearest"] == 0.5 and found["farthest"] == 2.0
    assert found["v"] == pytest.approx(1.25) and found["v_log2"] == pytest.approx(0.5)
    assert found["v_rms"] == pytest.approx(2.5**0.5)
    assert "nearest" not in measure(trained, Gradients(torch.zeros(1, 4), watched))
    trained.true_v.zero_()
    assert "v" not in measure(trained, Gradients(torch.zeros(1, 4), watched))


def test_scenarios_are_what_they_are_called():
    gradients, watched, stops = stopped(512, small=0.5, steps=9)
    assert stops and (gradients[:5, watched] == 0.5).all() and (gradients[5:, watched] == 0).all()
    assert (gradients[:, ~watched] != 0).all() and 0.05 < watched.float().mean() < 0.15
    assert (stopped(512, constant=True, steps=9).steps[:, ~watched] == 1).all()
    assert 0.01 < (sparse(512, steps=50).steps != 0).float().mean() < 0.03
    gradients, watched, stops = decaying(512, factor=0.5, steps=9)
    assert not stops and 2**-9 < gradients[8, watched].square().mean().sqrt() < 2**-7
    assert gradients[8, ~watched].square().mean().sqrt() > 0.5
    assert normal(512, 9, size=1e18).steps.std().item() == pytest.approx(1e18, rel=0.05)
    deviation = normal(512, 99, octaves=1.5).steps.square().mean(0).sqrt().log2()
    assert deviation.std().item() == pytest.approx(1.5, rel=0.1)
    sizes = heavy_tailed(512, 99).steps.square().mean(0).sqrt().log10()
    assert 7.5 < (sizes.max() - sizes.min()).item() < 8.5
    assert (one_sided(512, 9).steps >= 0).all()
    scale = changing_scale(512, 200).steps.square().mean(1).sqrt()
    assert (scale[50] / scale[0]).log10().item() == pytest.approx(2, abs=0.5)
    assert (scale[150] / scale[0]).log10().item() == pytest.approx(-2, abs=0.5)


def test_a_range_is_that_of_the_first_moment_and_the_packages_is_half_of_f_squared():
    steps = stopped(256, steps=6).steps
    package, half, wide = (train(steps, Options(factor=factor)) for factor in (None, 0.5, 2.0))
    assert all(torch.equal(a, b) for a, b in zip(package, half, strict=True))
    assert not torch.equal(wide[0], half[0])
    # fp32 AdamW's, and second moments.
    assert all(torch.equal(a, b) for a, b in zip(wide[1:], half[1:], strict=True))


@pytest.mark.parametrize("change", [*FORMER, "rounding", "expand"])
def test_every_alteration_alters(change):
    steps = normal(256, 12, octaves=1.5).steps
    value = not Options(rounding=True)._asdict()[change]
    ways = [
        train(steps, o).coded
        for o in (Options(rounding=True), Options(rounding=True)._replace(**{change: value}))
    ]
    assert not torch.equal(*ways)


def test_main_writes_every_row(monkeypatch, tmp_path, capsys):
    one = {7: {"stopped": lambda: stopped(256, steps=7)}, 8: {"random": lambda: normal(256, 8)}}
    monkeypatch.setattr(trajectories, "SCENARIOS", one)
    rows = [
        (True, "", Options()),
        (False, "fresh grids", Options("int8", "log8", fresh_grids=True)),
    ]
    monkeypatch.setattr(trajectories, "configurations", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["trajectories", "--output", str(tmp_path)])
    trajectories.main()
    path = tmp_path / "accuracy/trajectories.json"
    first, second = json.loads(path.read_text())["rows"]
    assert (first["first"], second["second"], second["altered"]) == ("e4m3", "log8", "fresh grids")
    wanted = Joined({"stopped": stopped(256, steps=7)}).compare(Options())["stopped"]
    assert first["stopped 7 farthest"] == pytest.approx(wanted["farthest"], rel=1e-3)
    assert "random 8 error" in first and "random 8 error" not in second
    assert "farthest" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    assert sum('"betas"' in line for line in lines) == 2 and not any(
        a == b for a, b in pairwise(lines)
    )
