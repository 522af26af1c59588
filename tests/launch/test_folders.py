"""Folders that an earlier run has written to: refused, continued, or begun anew."""

import errno
import json
import os
from contextlib import ExitStack, nullcontext

import pytest

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.write import lock, publish
from launch.train import arguments
from launch.train.folders import open_folders
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import command, configuration, rank_main
from tests.support import held_elsewhere, run_ranks

RECORD = {"step": 0, "consumed_samples": 0, "loss": 2.5}


def arrange(folder, *steps, latest=None):
    """A folder that looks as if these steps had been saved."""
    for step in steps:
        made = folder / publish.name_of(step)
        made.mkdir(parents=True)
        progress = {"step": step, "consumed_samples": 8 * step, "loss": step / 3}
        (made / "manifest.json").write_text(json.dumps({"format": 1, "progress": progress, "run": {}, "files": {}}))
    if steps:
        (folder / "latest").write_text(publish.name_of(latest or steps[-1]))
    return folder


def metrics(folder, last, factor=3):
    folder.mkdir(exist_ok=True)
    records = [{"step": s, "consumed_samples": 8 * s, "loss": s / factor} for s in range(1, last + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def opened(*argv):
    needed = ["--deepspeed_config", "x", "--model", "x", "--data", "x", "--train-steps", "9"]
    with ExitStack() as locks:
        return open_folders(arguments.parse([*needed, *map(str, argv)]), locks)


def listing(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def refused(folder, *argv):
    """The error, after which nothing in ``folder`` has changed."""
    before = listing(folder)
    with pytest.raises((CoatConfigError, CheckpointError)) as problem:
        opened(*argv)
    assert listing(folder) == before
    text = str(problem.value)
    assert "\n" not in text and "accepted: " in text
    return text


def test_a_fresh_start_leaves_an_earlier_run_alone(tmp_path):
    save, output, board = arrange(tmp_path / "save", 3, 6), metrics(tmp_path / "run", 6), tmp_path / "board"
    board.mkdir()
    (board / "events.out.tfevents.1.host").write_text("")
    for name, folder in (("save", save), ("output", output), ("tensorboard", board)):
        text = refused(tmp_path, f"--{name}", folder)
        assert text.startswith(f"--{name}: got {folder}, which holds ")
        assert "--load auto" in text and "--overwrite" in text
        refused(tmp_path, f"--{name}", f"{folder}/")
    (save / "latest").unlink()  # a kill within the first save
    assert "--save: got" in refused(tmp_path, "--save", save)
    for step in (3, 6):  # and in the middle of saving these again
        (save / publish.name_of(step)).rename(save / f".unfinished-replaced-{publish.name_of(step)}")
    assert "--save: got" in refused(tmp_path, "--save", save)
    found = opened("--save", save, "--overwrite")
    assert sorted(found.superseded) == [save / publish.name_of(3), save / publish.name_of(6)]
    assert publish.own_name(opened("--load", save / publish.name_of(3), "--save", save).source) == publish.name_of(3)
    only_latest = tmp_path / "other"
    only_latest.mkdir()
    (only_latest / "latest").write_text("global_step5")  # another program's
    assert "--save: got" in refused(tmp_path, "--save", only_latest)
    assert opened("--save", tmp_path / "new", "--output", tmp_path / "run2").source is None
    assert (tmp_path / "new").is_dir() and (tmp_path / "run2").is_dir() and not listing(tmp_path / "new")
    empty = metrics(tmp_path / "none", 0)
    assert opened("--output", empty).source is None


def test_a_run_that_continues_may_write_to_its_folders(tmp_path, monkeypatch):
    save, output = arrange(tmp_path / "save", 3, 6), metrics(tmp_path / "run", 8)
    (tmp_path / "link").symlink_to(save)
    monkeypatch.chdir(save / "step00000003")
    for load, step in (
        ("auto", 6),
        (save, 6),
        (f"{save}/", 6),
        (tmp_path / "link", 6),
        (save / "step00000003", 3),
        (".", 3),
        ("..", 6),
    ):
        found = opened("--load", load, "--save", save, "--output", output)
        assert found.source == save / publish.name_of(step) and not found.superseded, load
    fresh = opened("--load", "auto", "--save", tmp_path / "new", "--output", output)
    assert fresh.source is None  # killed before its first checkpoint; its metrics are renamed, not cut
    assert "which is a checkpoint" in refused(tmp_path, "--load", ".", "--save", ".")
    assert "which is in --save" in refused(tmp_path, "--load", save, "--save", save, "--overwrite")
    with pytest.raises(CoatConfigError, match="--overwrite: got True, accepted: not with --load auto"):
        opened("--load", "auto", "--save", save, "--overwrite")


def test_branching_into_a_used_folder_is_refused(tmp_path):
    mine, other = arrange(tmp_path / "mine", 3), arrange(tmp_path / "other", 3, 6)
    assert refused(tmp_path, "--load", mine, "--save", other).startswith(f"--save: got {other}, which holds ")
    found = opened("--load", mine, "--save", other, "--overwrite")
    assert found.source == mine / "step00000003"
    assert found.superseded == [other / "step00000003", other / "step00000006"]
    foreign = metrics(tmp_path / "foreign", 6, factor=4)
    assert "whose metrics.jsonl is not of the run that saved" in refused(tmp_path, "--load", mine, "--output", foreign)
    assert opened("--load", mine, "--output", foreign, "--overwrite").source is not None
    assert opened("--load", mine, "--output", metrics(tmp_path / "short", 2, factor=4)).source  # nothing would be cut


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("save", "output", "tensorboard"):
        assert f"--{name}" in refused(tmp_path, f"--{name}", tmp_path / "file")
        assert f"--{name}: got" in refused(tmp_path, f"--{name}", tmp_path / "file" / "inside")
    assert "--load: got" in refused(tmp_path, "--load", tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "link", tmp_path / "link" / "inside", "/proc/x", "/dev/null", tmp_path / ("x" * 300)):
        for name in ("save", "output", "tensorboard"):
            assert refused(tmp_path, f"--{name}", place).startswith(f"--{name}: "), place
    assert "--load: got" in refused(tmp_path, "--load", tmp_path / "link")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened("--load", tmp_path)
    (tmp_path / "file").write_text("nonsense\n")
    os.replace(tmp_path / "file", tmp_path / "metrics.jsonl")
    with pytest.raises(CoatConfigError, match="metrics.jsonl:1: got"):
        opened("--output", tmp_path)


def test_a_folder_that_another_run_writes_to(tmp_path):
    save, output = arrange(tmp_path / "save", 3), metrics(tmp_path / "run", 5)
    argv = ("--save", save, "--output", output, "--load", "auto")
    for name, folder in (("save", save), ("output", output)):
        with held_elsewhere(folder / ".lock"):
            text = refused(tmp_path, *argv)
        assert text.startswith(f"--{name}: got {folder}, which another program is writing to, accepted: ")
    (tmp_path / "link").symlink_to(save)
    with held_elsewhere(save / ".lock"):
        assert "another program" in refused(tmp_path, "--save", tmp_path / "link", "--load", "auto")
        assert "another program" in refused(tmp_path, "--save", save, "--overwrite")
    assert opened(*argv).source == save / "step00000003"
    same = tmp_path / "same"
    assert opened("--save", same, "--output", same).source is None and not listing(same)
    (save / ".lock").write_text("")  # what a killed run leaves holds nobody up
    assert opened(*argv).source is not None


def test_what_a_run_saved_until_the_folder_was_free_is_seen(tmp_path, monkeypatch):
    def locked(path):
        arrange(tmp_path / "save", 7)
        return nullcontext()

    monkeypatch.setattr(lock, "locked", locked)
    assert opened("--save", tmp_path / "save", "--load", "auto").source == tmp_path / "save" / "step00000007"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def locked(path):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "locked", locked)
    assert opened("--save", tmp_path / "save").source is None
    assert "warning: " in capsys.readouterr().err


def test_runs_refuse_continue_and_begin_anew(work, tmp_path):
    """One after the other into the same folders; the old checkpoint goes when the first new one is complete."""
    config, save, run = configuration(tmp_path, 2), tmp_path / "save", tmp_path / "run"

    def end(*more, steps=2, to=run):
        more = ["--save", save, "--keep-last", "1", *more]
        return set(run_ranks(2, rank_main, command(work, to, config, *more, steps=steps)))

    assert all(text.startswith("finished 2") for text in end())
    (text,) = end()
    assert text.startswith(f"CoatConfigError: --save: got {save}, which holds checkpoints of an earlier run")
    (text,) = end("--load", "auto", "--save", tmp_path / "other", "--overwrite", to=tmp_path / "other")
    assert "--overwrite: got True" in text and not (tmp_path / "other").exists()
    (save / "step00000002").rename(save / ".unfinished-replaced-step00000002")  # a kill while it was saved again
    assert all(t.startswith("finished 3") for t in end("--load", "auto", steps=3))
    assert [r["step"] for r in read_metrics(run)] == [1, 2, 3]
    first = read_metrics(run)
    assert json.loads((save / "step00000003/manifest.json").read_text())["progress"]["loss"] == first[-1]["loss"]
    assert all(t.startswith("finished 1") for t in end("--overwrite", steps=1))
    assert [p.name for p in save.glob("*step*")] == ["step00000001"]
    assert [r["step"] for r in read_metrics(run)] == [1] and read_metrics(run / "metrics.jsonl.1") == first
