"""Smoothing and gaps of losses."""

import json
import math

import pytest

from launch.plot import gap, main, series, smoothed


def records(losses, start=1, **more):
    return [{"step": step, "loss": loss, **more} for step, loss in enumerate(losses, start)]


def test_smoothing():
    assert smoothed([4.0, 2.0, 6.0, 0.0], 1) == [4.0, 2.0, 6.0, 0.0]
    assert smoothed([4.0, 2.0, 6.0, 0.0], 3) == pytest.approx([4.0, 3.0, 4.0, 8 / 3])
    constant = smoothed([5.0] * 20, 0.9)
    assert constant == pytest.approx([5.0] * 20)  # no start from 0
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_series_leaves_out_what_is_not_finite_and_takes_the_later_of_two():
    found = series([*records([1.0, None, math.nan, math.inf, 5.0]), {"step": 1, "loss": 9.0}, {"step": 6}], "loss")
    assert found == {1: 9.0, 5: 5.0}


def test_gap_of_runs_of_different_lengths_with_holes():
    base, run = records([2.0, 4.0, 0.0, 8.0, 10.0]), records([4.4, 5.0, None, 11.0, 12.0, 13.0], start=2)
    found = gap(run, base)
    assert found.steps == [2, 5] and found.relative == pytest.approx([0.1, 0.1])
    assert found.one_only == 3 and found.not_finite == 2 and found.at_the_end == pytest.approx(0.1)


def test_both_are_smoothed_over_the_same_steps():
    base, run = records([100.0] * 10 + [1.0] * 10), records([2.0] * 10, start=11)  # resumed into another folder
    assert gap(run, base, smooth=50).relative == pytest.approx([1.0] * 10)
    assert gap(run, base, smooth=0.99).relative == pytest.approx([1.0] * 10)


def write(folder, losses, start=1):
    folder.mkdir()
    more = {"tokens_per_second_per_gpu": 1.0, "peak_memory_bytes": 1, "valid_loss": 3.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(losses, start, **more)))
    return str(folder)


def test_plot_with_a_gap(tmp_path, capsys):
    runs = [write(tmp_path / "bf16", [4.0] * 20), write(tmp_path / "coat", [4.04] * 18 + [None], start=3)]
    for smooth in ("1", "5", "0.9"):
        picture = tmp_path / f"{smooth}.png"
        assert main([*runs, "--gap", "--smooth", smooth, "--output", str(picture)]) == 0
        assert picture.stat().st_size > 10_000
        out = capsys.readouterr().out
        assert "coat against bf16: +1.000 % over the last tenth of 18 common steps (3 to 20)" in out
        assert "left out: 3 steps of one run only, 0 without a finite loss" in out
    assert main([*runs, "--log-level", "warning", "--output", str(picture)]) == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize("smooth", ["0", "-1", "many"])
def test_smooth_that_makes_no_sense(tmp_path, capsys, smooth):
    try:
        status = main([write(tmp_path / "a", [1.0]), "--smooth", smooth, "--output", str(tmp_path / "x.png")])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and capsys.readouterr().err.startswith("error: --smooth: got ")


def test_a_gap_of_runs_without_a_common_step(tmp_path, capsys):
    a, b = write(tmp_path / "a", [1.0] * 3), write(tmp_path / "b", [1.0] * 3, start=10)
    assert main([a, b, "--gap", "--output", str(tmp_path / "x.png")]) == 2
    assert "--gap: b and a have no step at which both have a loss" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
