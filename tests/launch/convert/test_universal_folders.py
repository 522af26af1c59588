"""What ``launch/to_universal.py`` does with folders: paths of every form, repetitions, errors of
the disk.
"""

import errno
import json
import os
import shutil

import pytest
import torch

import coat_dist
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest, sync_files, verify
from coat_dist.checkpoint.write import publish
from launch import to_universal
from launch.convert.sources import open_weights
from tests.launch.disk import PLACES, Failing, listing
from tests.support import held_elsewhere


def make(save, step, seed=0):
    """A finished checkpoint of one file."""
    final = save / publish.name_of(step)
    temporary = publish.unfinished(final)
    temporary.mkdir(parents=True)
    (temporary / "states.pt").write_text(f"{step} {seed}")
    progress = {"step": step, "loss": seed / 7}
    publish.finish(
        temporary,
        final,
        {"format": 1, "progress": progress, "run": {}, "files": sync_files(temporary)},
    )
    (save / publish.LATEST).write_text(final.name)
    return final


@pytest.fixture(autouse=True)
def conversion(monkeypatch):
    """A conversion that copies into nested folders, as the real one writes."""

    def convert(source, target, on_progress):
        (target / "zero" / "weight").mkdir(parents=True)
        torch.save((source / "states.pt").read_text(), target / "zero" / "weight" / "fp32.pt")
        on_progress(10, 10)

    monkeypatch.setattr(coat_dist, "convert_to_universal", convert)


FULL = "error: {option}: cannot write {place}: the disk is full"


def main(load, output):
    return to_universal.main(["--load", str(load), "--output", str(output)])


def whole(output):
    """The checkpoint that a load would take, with its content."""
    found = publish.find(output)
    manifest = read_manifest(found)
    assert manifest["universal"]
    verify(found, manifest["files"])
    return found.name, torch.load(found / "zero/weight/fp32.pt")


def test_every_form_of_a_path(tmp_path, monkeypatch, capsys):
    step = make(tmp_path / "save", 4)
    (tmp_path / "link").symlink_to(step)
    shutil.copytree(step, tmp_path / "a copy")
    monkeypatch.chdir(step)
    for number, way in enumerate((".", "../", step, tmp_path / "link", tmp_path / "a copy")):
        output = tmp_path / f"out{number}"
        output.mkdir()
        (output / "notes.txt").write_text("mine")
        assert main(way, f"{output}/" if number % 2 else output) == 0, way
        assert sorted(os.listdir(output)) == [
            "latest",
            "latest_universal",
            "notes.txt",
            "step00000004",
        ], way
        assert whole(output) == ("step00000004", "4 0")
    other = make(tmp_path / "other", 4, seed=1)
    before = listing(tmp_path)
    for load, output, why in (
        (".", "..", "where the source is"),
        (".", "inside", "which is a checkpoint or in one"),
        (".", tmp_path / "out0/step00000004", "which is a checkpoint or in one"),
        (".", other.parent, "which holds a run's own checkpoint, step00000004"),
        (other, tmp_path / "out0", "which holds another run's step00000004"),
    ):
        assert main(load, output) == 2
        assert f", {why}, accepted: another folder" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_twice_replaces_and_leaves_nothing_behind(tmp_path):
    save, output = tmp_path / "save", tmp_path / "out"
    make(save, 4)
    make(save, 6)
    for step in (6, 6, 4, 6):
        assert main(save / publish.name_of(step), output) == 0
        for name in ("latest", "latest_universal"):
            assert (output / name).read_text() == publish.name_of(step)
    assert sorted(os.listdir(output)) == [
        "latest",
        "latest_universal",
        "step00000004",
        "step00000006",
    ]
    (output / ".unfinished-replaced-step00000006").mkdir()  # of a conversion that was killed
    (output / ".unfinished-step00000004").mkdir()
    assert main(save, output) == 0
    assert sorted(os.listdir(output)) == [
        "latest",
        "latest_universal",
        "step00000004",
        "step00000006",
    ]


def test_killed_while_a_step_was_saved_again(tmp_path):
    """``find`` gives the old checkpoint under its passing name; the conversion has the step's."""
    step = make(tmp_path / "save", 4)
    step.rename(step.with_name(".unfinished-replaced-step00000004"))
    for i, load in enumerate((tmp_path / "save", step)):
        assert main(load, tmp_path / f"out{i}") == 0
        assert whole(tmp_path / f"out{i}") == ("step00000004", "4 0")
    with pytest.raises(
        CheckpointError,
        match=r"\.unfinished-replaced-step00000004: does not say of which model it is",
    ):
        open_weights(step)  # for convert_hf.py and --init-from


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("place", sorted(PLACES))
def test_an_error_anywhere_leaves_a_whole_checkpoint(tmp_path, place, for_good):
    save, output = tmp_path / "save", tmp_path / "out"
    source = make(save, 4)
    before = source.stat().st_mtime_ns, listing(source)
    failed, nth = True, 0
    while failed:
        nth += 1
        shutil.rmtree(output, ignore_errors=True)
        to_universal.convert(source, output)
        raised = None
        with Failing(place, nth, for_good) as failure:
            try:
                to_universal.convert(source, output)
            except (CheckpointError, OSError) as problem:
                raised = str(problem)
        failed = failure.failed > 0
        if raised is not None:
            assert "Input/output error" in raised or "file write failed" in raised, raised
        # Where renaming back fails as well, it has its passing name until the next conversion.
        assert whole(output)[1] == "4 0", f"{place}, call {nth}"
        to_universal.convert(source, output)
        assert sorted(os.listdir(output)) == ["latest", "latest_universal", "step00000004"], (
            f"{place}, call {nth}"
        )
    assert (source.stat().st_mtime_ns, listing(source)) == before and json.loads(
        (source / "manifest.json").read_text()
    )


@pytest.mark.parametrize(
    ("problem", "status", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, FULL),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 6"),
            2,
            FULL,
        ),
        (KeyboardInterrupt(), 130, "to_universal: interrupted; nothing was changed"),
    ],
)
def test_main_stopped_while_converting_leaves_nothing(
    tmp_path, monkeypatch, capsys, problem, status, said
):
    def stopped(source, target, on_progress):
        (target / "zero").mkdir()
        raise problem

    monkeypatch.setattr(coat_dist, "convert_to_universal", stopped)
    step, output = make(tmp_path / "save", 4), tmp_path / "out"
    for option, place in (("--output", output / step.name), ("--output_folder", output)):
        assert to_universal.main(["--load", str(step), option, str(output)]) == status
        assert capsys.readouterr().err == said.format(option=option, place=place) + "\n"
        assert os.listdir(tmp_path) == ["save"]


def test_two_conversions_at_once(tmp_path, capsys):
    make(tmp_path / "save", 4)
    output = tmp_path / "universal"
    assert main(tmp_path / "save", output) == 0
    (output / ".unfinished-step00000004").mkdir()  # where the other is writing
    before = listing(output)
    with held_elsewhere(output / ".lock"):
        assert main(tmp_path / "save", output) == 2
    assert (
        f"error: --output: got {output}, which another program is writing to"
        in capsys.readouterr().err
    )
    assert listing(output) == before
