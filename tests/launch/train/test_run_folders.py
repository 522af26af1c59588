"""Folders that an earlier run has written to: refused, continued, or begun anew."""

import json
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import pytest

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.write import publish
from coat_dist.ranks import check_same_on_all_ranks
from launch.common import lock
from launch.train import pretrain_options
from launch.train.metrics import read_metrics
from launch.train.run_folders import open_folders, open_on_nodes
from tests.coat_dist.test_shared_folders import error_of, on_a_node
from tests.launch.disk import listing
from tests.launch.pretrain_runs import REQUIRED, configuration, pretrain_on
from tests.support import held_elsewhere, run_ranks


def arrange(folder, *steps, latest=None):
    """A folder that looks as if these steps had been saved."""
    for step in steps:
        made = folder / publish.name_of(step)
        made.mkdir(parents=True)
        progress = {"step": step, "consumed_samples": 8 * step, "loss": step / 3}
        (made / "manifest.json").write_text(
            json.dumps({"format": 1, "progress": progress, "run": {}, "files": {}})
        )
    if steps:
        (folder / "latest").write_text(publish.name_of(latest or steps[-1]))
    return folder


def metrics(folder, last, factor=3):
    folder.mkdir(exist_ok=True)
    records = [
        {"step": s, "consumed_samples": 8 * s, "loss": s / factor} for s in range(1, last + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def options(*argv):
    return pretrain_options.parse([*REQUIRED, *map(str, argv)])


def opened(*argv):
    with ExitStack() as locks:
        return open_folders(options(*argv), locks)


def refused(*argv):
    with pytest.raises((CoatConfigError, CheckpointError)) as problem:
        opened(*argv)
    text = str(problem.value)
    assert "\n" not in text and "accepted: " in text
    return text


def test_a_fresh_start_leaves_an_earlier_run_alone(tmp_path):
    save, output = arrange(tmp_path / "save", 3, 6), metrics(tmp_path / "run", 6)
    for name, folder in (("save", save), ("output", output)):
        before = listing(tmp_path)
        text = refused(f"--{name}", folder)
        assert (
            text.startswith(f"--{name}: got {folder}, which holds ") and listing(tmp_path) == before
        )
        assert "--load auto" in text and "--overwrite" in text
    (save / "latest").unlink()  # a kill within the first save
    assert "--save: got" in refused("--save", save)
    for step in (3, 6):  # and in the middle of saving these again
        (save / publish.name_of(step)).rename(
            save / f".unfinished-replaced-{publish.name_of(step)}"
        )
    assert "--save: got" in refused("--save", save)
    found = opened("--save", save, "--overwrite")
    assert sorted(found.superseded) == [save / publish.name_of(3), save / publish.name_of(6)]
    assert publish.own_name(
        opened("--load", save / publish.name_of(3), "--save", save).source
    ) == publish.name_of(3)
    only_latest = tmp_path / "other"
    only_latest.mkdir()
    (only_latest / "latest").write_text("global_step5")  # another program's
    assert "--save: got" in refused("--save", only_latest)
    assert (
        opened("--save", tmp_path / "new", "--output", metrics(tmp_path / "none", 0)).source is None
    )
    assert (tmp_path / "new").is_dir() and not listing(tmp_path / "new")


def test_a_run_that_continues_may_write_to_its_folders(tmp_path, monkeypatch):
    save, output = arrange(tmp_path / "save", 3, 6), metrics(tmp_path / "run", 8)
    (tmp_path / "link").symlink_to(save)
    monkeypatch.chdir(save / "step00000003")
    for load, step in (
        ("auto", 6),
        (save, 6),
        (tmp_path / "link", 6),
        (save / "step00000003", 3),
        (".", 3),
        ("..", 6),
    ):
        found = opened("--load", load, "--save", save, "--output", output)
        assert found.source == save / publish.name_of(step) and not found.superseded, load
    fresh = opened("--load", "auto", "--save", tmp_path / "new", "--output", output)
    # Killed before its first checkpoint; its metrics are renamed, not cut.
    assert fresh.source is None


def test_branching_into_a_used_folder_is_refused(tmp_path):
    mine, other = arrange(tmp_path / "mine", 3), arrange(tmp_path / "other", 3, 6)
    assert refused("--load", mine, "--save", other).startswith(f"--save: got {other}, which holds ")
    found = opened("--load", mine, "--save", other, "--overwrite")
    assert found.source == mine / "step00000003"
    assert found.superseded == [other / "step00000003", other / "step00000006"]
    foreign = metrics(tmp_path / "foreign", 6, factor=4)
    assert "whose metrics.jsonl is not of the run that saved" in refused(
        "--load", mine, "--output", foreign
    )
    assert opened("--load", mine, "--output", foreign, "--overwrite").source is not None
    # Nothing would be cut.
    assert opened("--load", mine, "--output", metrics(tmp_path / "short", 2, factor=4)).source


@pytest.mark.parametrize("name", ["save", "output", "tensorboard"])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in (
        tmp_path / "file",
        tmp_path / "file/x",
        tmp_path / "link",
        "/proc/x",
        tmp_path / ("x" * 300),
    ):
        assert refused(f"--{name}", place).startswith(
            f"--{name}: got {place}, accepted: a folder to write to"
        )


def test_what_cannot_be_read_is_named(tmp_path):
    assert "--load: got" in refused("--load", tmp_path / "nowhere")
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened("--load", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(CoatConfigError, match="metrics.jsonl:1: got"):
        opened("--output", tmp_path)


def test_a_folder_that_another_run_writes_to(tmp_path):
    save, output = arrange(tmp_path / "save", 3), metrics(tmp_path / "run", 5)
    argv = ("--save", save, "--output", output, "--load", "auto")
    for name, folder in (("save", save), ("output", output)):
        with held_elsewhere(folder / ".lock"):
            assert refused(*argv).startswith(
                f"--{name}: got {folder}, which another program is writing to, accepted: "
            )
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
    assert (
        opened("--save", tmp_path / "save", "--load", "auto").source
        == tmp_path / "save" / "step00000007"
    )


def prepared(rank, world, folder, data):
    from launch.data import dataset

    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    made, samples, replace = [], [], os.replace

    def counted(source, target):
        made.append(Path(target).parent.name)
        replace(source, target)

    with mock.patch.object(os, "replace", counted):
        for cache in ("own", f"{folder}/common"):
            train, *_ = dataset.build_datasets([data], "80,10,10", 32, 40, 8, 0, 3, cache)
            samples.append([train[i]["tokens"].tolist() for i in range(0, 40, 7)])
    shared = error_of(lambda: open_on_nodes(options("--save", "disk"), ExitStack()))
    return made, samples, shared


def test_folders_of_nodes(work, tmp_path):
    """Caches are built once on each node, or once where nodes share them; checkpoints need a
    folder of all nodes.
    """
    (first, samples, error), (second, others, _) = run_ranks(
        2, prepared, str(tmp_path), str(work / "data")
    )
    assert set(first) == {"own", "common"} and set(second) == {"own"}
    assert first.count("own") == second.count("own") == first.count("common") == 2
    assert samples[0] == samples[1] == others[0] == others[1]
    assert error.startswith(
        "--save: got disk, which rank 0 (host node-a) and rank 1 (host node-b) do not share"
    )


def test_runs_refuse_continue_and_begin_anew(work, tmp_path):
    """One after the other into the same folders; the old checkpoint goes when the first new one
    is complete.
    """
    config, save, run = configuration(tmp_path, 2), tmp_path / "save", tmp_path / "run"

    def end(*more, steps=2, to=run):
        more = ["--save", save, "--keep-last", "1", *more]
        return set(pretrain_on(2, work, to, config, *more, steps=steps))

    assert all(text.startswith("finished 2") for text in end())
    (text,) = end()
    assert text.startswith(
        f"CoatConfigError: --save: got {save}, which holds checkpoints of an earlier run"
    )
    # A kill while it was saved again.
    (save / "step00000002").rename(save / ".unfinished-replaced-step00000002")
    assert all(t.startswith("finished 3") for t in end("--load", "auto", steps=3))
    assert [r["step"] for r in read_metrics(run)] == [1, 2, 3]
    first = read_metrics(run)
    assert (
        json.loads((save / "step00000003/manifest.json").read_text())["progress"]["loss"]
        == first[-1]["loss"]
    )
    assert all(t.startswith("finished 1") for t in end("--overwrite", steps=1))
    assert [p.name for p in save.glob("*step*")] == ["step00000001"]
    assert [r["step"] for r in read_metrics(run)] == [1] and read_metrics(
        run / "metrics.jsonl.1"
    ) == first
