"""Pictures of runs."""

import json
import resource

import pytest

from launch.plot import main


def write(folder, steps, **more):
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for i in steps:
            file.write(
                json.dumps(
                    {
                        "step": i,
                        "loss": 10.0 / i,
                        "tokens_per_second_per_gpu": 100.0,
                        "peak_memory_bytes": 2**30,
                        **more,
                    }
                )
                + "\n"
            )


def test_draws_several_runs(tmp_path):
    write(tmp_path / "a", range(1, 30), valid_loss=3.0)
    write(tmp_path / "b" / "a", range(1, 3), skipped="non-finite loss")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": null}\n')
    picture = tmp_path / "deep" / "loss.png"
    assert (
        main(
            [
                str(tmp_path / "a"),
                str(tmp_path / "b" / "a" / "metrics.jsonl"),
                "--output",
                str(picture),
                "--smooth",
                "5",
            ]
        )
        == 0
    )
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000


@pytest.mark.parametrize("content", [None, "", "nonsense\n"])
def test_bad_input_is_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(tmp_path) in error


def test_runs_without_a_finite_loss_are_said(tmp_path, capsys):
    """All of them: an error, and no empty picture; some of them: a line."""
    write(tmp_path / "good", range(1, 3))
    for name in ("bad", "worse"):
        write(tmp_path / name, range(1, 3), loss=None)
    picture = tmp_path / "x.png"
    assert main([str(tmp_path / "bad"), str(tmp_path / "worse"), "--output", str(picture)]) == 2
    said = capsys.readouterr().err
    assert said == "error: bad, worse: no finite loss in any step, accepted: a run that has some\n"
    assert not picture.exists()
    assert main([str(tmp_path / "good"), str(tmp_path / "bad"), "--output", str(picture)]) == 0
    out = capsys.readouterr()
    assert "bad: no finite loss in any step\n" in out.out + out.err and picture.exists()
    assert "good: no finite" not in out.out + out.err


def test_unknown_format_is_one_line(tmp_path, capsys):
    write(tmp_path / "a", range(1, 3))
    assert main([str(tmp_path / "a"), "--output", str(tmp_path / "x.nonsense")]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_file_that_is_no_picture_is_not_replaced(tmp_path, capsys):
    write(tmp_path / "a", range(1, 3))
    for name in ("notes.png", "notes.svg", "notes.pdf"):
        (tmp_path / name).write_text("mine")
        assert main([str(tmp_path / "a"), "--output", str(tmp_path / name)]) == 2
        assert "--output: got " in capsys.readouterr().err and (tmp_path / name).read_text() == "mine"
        (tmp_path / name).write_text("")
        for _ in range(2):  # its own is
            assert main([str(tmp_path / "a"), "--output", str(tmp_path / name)]) == 0
    assert main([str(tmp_path / "a"), "--output", str(tmp_path / "picture")]) == 2
    assert "ends in .png" in capsys.readouterr().err and not list(tmp_path.glob("picture*"))


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_full_disk_leaves_the_earlier_picture(tmp_path, capsys, suffix):
    write(tmp_path / "a", range(1, 30))
    picture = tmp_path / f"x.{suffix}"
    assert main([str(tmp_path / "a"), "--output", str(picture)]) == 0
    before = picture.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        assert main([str(tmp_path / "a"), "--output", str(picture)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert error.startswith(f"error: --output: {picture}: cannot be written (") and error.count("\n") == 1
    assert picture.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a", picture.name]


def test_a_link_to_a_picture_stays_one(tmp_path):
    write(tmp_path / "a", range(1, 3))
    (tmp_path / "link.png").symlink_to(tmp_path / "data")
    assert main([str(tmp_path / "a"), "--output", str(tmp_path / "link.png")]) == 0
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "data").stat().st_size > 10_000


def test_every_run_has_a_name_of_its_own(tmp_path, monkeypatch):
    write(tmp_path / "a", range(1, 4))
    monkeypatch.chdir(tmp_path / "a")
    drawn = []
    monkeypatch.setattr("launch.plot.draw", lambda runs, *_: drawn.extend(runs) or [])
    assert main([".", ".", "../a", str(tmp_path / "a" / "metrics.jsonl"), "--output", "x.png"]) == 0
    assert len(drawn) == len(set(drawn)) == 4 and drawn[0] == "a" and all(drawn)


def test_memory_stays_below_the_frame(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    limits = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: limits.append(figure.axes[2].get_ylim()))
    write(tmp_path / "a", range(1, 9))
    assert main([str(tmp_path / "a"), "--output", str(tmp_path / "x.png")]) == 0
    ((low, high),) = limits
    assert low == 0 and high > 1.1, "GiB, where the line is at 1"
