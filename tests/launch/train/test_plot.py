"""Plots of runs, and gaps of their losses."""

import json
import math
import re

import pytest

from launch.plot import gap, main, series, smoothed


def records(losses, start=1):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, start)]


def write(folder, losses=(10.0, 5.0), start=1):
    """A run's ``metrics.jsonl``; its folder."""
    folder.mkdir(parents=True)
    more = {"tokens_per_second_per_gpu": 100.0, "peak_memory_bytes": 2**30, "valid_loss": 3.0}
    lines = [json.dumps({**record, **more}) + "\n" for record in records(losses, start)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_plot_draws_several_runs_with_a_gap(tmp_path, capsys):
    runs = [write(tmp_path / "bf16", [4.0] * 20), write(tmp_path / "coat", [4.04] * 18 + [None], 3)]
    picture = tmp_path / "deep" / "loss.png"
    argv = [*runs, "--gap", "--smooth", "5", "--output", str(picture)]
    assert main(argv) == 0
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    said = capsys.readouterr().out
    assert f"{runs[1]} against {runs[0]}: +1.000 %, last tenth of 18 common steps" in said
    assert main([*argv, "--log-level", "warning"]) == 0 and not capsys.readouterr().out


def test_series_and_gap_of_runs_with_holes():
    twice = [*records([1.0, None, math.nan, math.inf, 5.0]), {"step": 1, "loss": 9.0}, {"step": 6}]
    assert series(twice, "loss") == {1: 9.0, 5: 5.0}
    assert smoothed([4.0, 2.0, 6.0, 0.0], 3) == pytest.approx([4.0, 3.0, 4.0, 8 / 3])
    base, run = records([2.0, 4.0, 0.0, 8.0, 10.0]), records([4.4, 5.0, None, 11.0, 12.0], start=2)
    assert gap(run, base, 1) == pytest.approx({2: 0.1, 5: 0.1})
    # A resumed run is smoothed over the steps that both have.
    base, run = records([100.0] * 10 + [1.0] * 10), records([2.0] * 10, start=11)
    assert set(gap(run, base, 50).values()) == {1.0}


@pytest.mark.parametrize(
    ("losses", "argv", "error"),
    [
        ([5.0], ["--gap"], "error: --gap: .*b and .*a have no step at which both have a loss"),
        ([None], [], "error: .*b: no finite loss in any step, accepted: "),
        ([5.0], ["--output", "plot.docx"], "error: Format 'docx' is not supported"),
        ([5.0], ["none"], "error: .*No such file"),
    ],
)
def test_plot_refuses_in_one_line(tmp_path, capsys, monkeypatch, losses, argv, error):
    monkeypatch.chdir(tmp_path)
    runs = [write(tmp_path / "a"), write(tmp_path / "b", losses, start=10)]
    assert main([*runs, *argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.match(error, said), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
