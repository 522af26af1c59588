"""Plots of runs."""

import json
import resource

import pytest

from launch.plot import main


def write(folder, steps, **more):
    """A run's ``metrics.jsonl``; its folder."""
    folder.mkdir(parents=True)
    common = {"tokens_per_second_per_gpu": 100.0, "peak_memory_bytes": 2**30}
    records = [{"step": i, "loss": 10.0 / i, **common, **more} for i in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


def test_draws_several_runs(tmp_path, monkeypatch):
    """Of one name, too; a flat line of memory is not on the frame."""
    from matplotlib.figure import Figure

    limits, real = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: (limits.append(figure.axes[2].get_ylim()), real(figure, *a, **k))
    )
    runs = [
        write(tmp_path / "a", range(1, 30), valid_loss=3.0),
        write(tmp_path / "b" / "a", range(1, 3), skipped="nan"),
    ]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": null}\n')
    picture = tmp_path / "deep" / "loss.png"
    assert main([runs[0], f"{runs[1]}/metrics.jsonl", "--output", str(picture), "--smooth", "5"]) == 0
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
    good, *worse = (
        write(tmp_path / name, range(1, 3), loss=loss) for name, loss in (("a", 1), ("b", None), ("c", None))
    )
    picture = tmp_path / "x.png"
    assert main([*worse, "--output", str(picture)]) == 2
    assert "b, c: no finite loss in any step, accepted: " in capsys.readouterr().err and not picture.exists()
    assert main([good, worse[0], "--output", str(picture)]) == 0
    assert "b: no finite loss in any step\n" in capsys.readouterr().out and picture.exists()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_file_that_is_no_plot_is_not_replaced(tmp_path, capsys, suffix):
    run, file = write(tmp_path / "a", range(1, 3)), tmp_path / f"notes.{suffix}"
    file.write_text("mine")
    assert main([run, "--output", str(file)]) == 2
    assert "--output: got " in capsys.readouterr().err and file.read_text() == "mine"
    file.write_text("")
    for _ in range(2):  # its own is
        assert main([run, "--output", str(file)]) == 0


@pytest.mark.parametrize("name", ["picture", "x.nonsense"])
def test_unknown_format_is_one_line(tmp_path, capsys, name):
    assert main([write(tmp_path / "a", range(1, 3)), "--output", str(tmp_path / name)]) == 2
    assert "error: Format " in capsys.readouterr().err and not (tmp_path / name).exists()


def test_a_full_disk_leaves_the_earlier_plot(tmp_path, capsys):
    run, picture = write(tmp_path / "a", range(1, 30)), tmp_path / "x.png"
    assert main([run, "--output", str(picture)]) == 0
    before = picture.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        assert main([run, "--output", str(picture)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.startswith(f"error: --output: got {picture}, accepted: a file to write to (")
    assert picture.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a", picture.name]


def test_a_link_to_a_plot_stays_one(tmp_path):
    (tmp_path / "link.png").symlink_to(tmp_path / "data")
    assert main([write(tmp_path / "a", range(1, 3)), "--output", str(tmp_path / "link.png")]) == 0
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "data").stat().st_size > 10_000
