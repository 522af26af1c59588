"""Plots of runs, smoothing and gaps of losses."""

import json
import math
import resource

import pytest

from launch.plot import gap, main, series, smoothed


def records(losses, start=1, **more):
    return [{"step": step, "loss": loss, **more} for step, loss in enumerate(losses, start)]


def write(folder, losses=(10.0, 5.0), start=1, **more):
    """A run's ``metrics.jsonl``; its folder."""
    folder.mkdir(parents=True)
    common = {"tokens_per_second_per_gpu": 100.0, "peak_memory_bytes": 2**30, "valid_loss": 3.0}
    lines = [json.dumps(record) + "\n" for record in records(losses, start, **(common | more))]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_draws_several_runs(tmp_path, monkeypatch):
    """Of one name, too; a flat line of memory is not on the frame."""
    from matplotlib.figure import Figure

    limits, real = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *a, **k: (limits.append(figure.axes[2].get_ylim()), real(figure, *a, **k)),
    )
    runs = [
        write(tmp_path / "a", [10.0 / i for i in range(1, 30)]),
        write(tmp_path / "b" / "a", skipped="nan"),
    ]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": null}\n')
    picture = tmp_path / "deep" / "loss.png"
    assert (
        main([runs[0], f"{runs[1]}/metrics.jsonl", "--output", str(picture), "--smooth", "5"]) == 0
    )
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    assert limits[0][0] == 0 and limits[0][1] > 1.1, "GiB, where the line is at 1"


@pytest.mark.parametrize("content", [None, "", "nonsense\n"])
def test_bad_input_is_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(tmp_path) in error


def test_runs_without_a_finite_loss_are_named(tmp_path, capsys):
    """All of them: an error, and no empty plot; some of them: a line."""
    without = {"losses": [None, None], "valid_loss": None}
    good, *worse = (
        write(tmp_path / "a"),
        write(tmp_path / "b", **without),
        write(tmp_path / "c", **without),
    )
    picture = tmp_path / "x.png"
    assert main([*worse, "--output", str(picture)]) == 2
    assert (
        "b, c: no finite loss in any step, accepted: " in capsys.readouterr().err
        and not picture.exists()
    )
    assert main([good, worse[0], "--output", str(picture)]) == 0
    assert "b: no finite loss in any step\n" in capsys.readouterr().out and picture.exists()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_file_that_is_no_plot_is_not_replaced(tmp_path, capsys, suffix):
    run, file = write(tmp_path / "a"), tmp_path / f"notes.{suffix}"
    file.write_text("mine")
    assert main([run, "--output", str(file)]) == 2
    assert "--output: got " in capsys.readouterr().err and file.read_text() == "mine"
    file.write_text("")
    for _ in range(2):  # its own is
        assert main([run, "--output", str(file)]) == 0


def test_a_full_disk_leaves_the_earlier_plot(tmp_path, capsys):
    run, picture = write(tmp_path / "a", [1.0] * 30), tmp_path / "x.png"
    assert main([run, "--output", str(picture)]) == 0
    before = picture.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        assert main([run, "--output", str(picture)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.startswith(
        f"error: --output: got {picture}, accepted: a file to write to ("
    )
    assert picture.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        picture.name,
    ]


def test_smoothing():
    assert smoothed([4.0, 2.0, 6.0, 0.0], 1) == [4.0, 2.0, 6.0, 0.0]
    assert smoothed([4.0, 2.0, 6.0, 0.0], 3) == pytest.approx([4.0, 3.0, 4.0, 8 / 3])
    constant = smoothed([5.0] * 20, 0.9)
    assert constant == pytest.approx([5.0] * 20)  # no start from 0
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 3) / 0.75])


def test_series_leaves_out_what_is_not_finite_and_takes_the_later_of_two():
    found = series(
        [*records([1.0, None, math.nan, math.inf, 5.0]), {"step": 1, "loss": 9.0}, {"step": 6}],
        "loss",
    )
    assert found == {1: 9.0, 5: 5.0}


def test_gap_of_runs_of_different_lengths_with_holes():
    base, run = (
        records([2.0, 4.0, 0.0, 8.0, 10.0]),
        records([4.4, 5.0, None, 11.0, 12.0, 13.0], start=2),
    )
    found = gap(run, base)
    assert found.steps == [2, 5] and found.relative == pytest.approx([0.1, 0.1])
    assert found.one_only == 3 and found.not_finite == 2 and found.at_the_end == pytest.approx(0.1)


def test_both_are_smoothed_over_the_same_steps():
    # Resumed into another folder.
    base, run = records([100.0] * 10 + [1.0] * 10), records([2.0] * 10, start=11)
    assert gap(run, base, smooth=50).relative == pytest.approx([1.0] * 10)
    assert gap(run, base, smooth=0.99).relative == pytest.approx([1.0] * 10)


def test_plot_with_a_gap(tmp_path, capsys):
    runs = [
        write(tmp_path / "bf16", [4.0] * 20),
        write(tmp_path / "coat", [4.04] * 18 + [None], start=3),
    ]
    for smooth in ("1", "5", "0.9"):
        picture = tmp_path / f"{smooth}.png"
        assert main([*runs, "--gap", "--smooth", smooth, "--output", str(picture)]) == 0
        assert picture.stat().st_size > 10_000
        out = capsys.readouterr().out
        assert "coat against bf16: +1.000 % over the last tenth of 18 common steps (3 to 20)" in out
        assert "left out: 3 steps of one run only, 0 without a finite loss" in out
    assert (
        main([*runs, "--log-level", "warning", "--output", str(picture)]) == 0
        and capsys.readouterr().out == ""
    )


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--smooth", "0"], "error: --smooth: got 0, accepted: "),
        (["--gap"], "error: --gap: b and a have no step at which both have a loss"),
        (["--output", "plot"], "error: Format '' is not supported"),
    ],
)
def test_errors_are_one_line_and_write_nothing(tmp_path, capsys, monkeypatch, argv, error):
    monkeypatch.chdir(tmp_path)
    runs = [write(tmp_path / "a"), write(tmp_path / "b", start=10)]
    assert main([*runs, *argv]) == 2
    assert capsys.readouterr().err.startswith(error) and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["a", "b"]
