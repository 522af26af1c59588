"""Checkpoints under kills and errors, with an engine that only writes a file."""

import json
import os

import pytest

from coat_dist.checkpoint.manifest import CheckpointError, differences, read_manifest, verify
from coat_dist.checkpoint.write.publish import find
from launch.train import checkpoint
from tests.launch.saved_steps import Engine, progress, start
from tests.support import run_ranks


def save_steps(rank, world, folder, steps, keep):
    start()
    return [
        str(checkpoint.save(Engine(), folder, {"model": {"a": 1}}, progress(s), keep))
        for s in steps
    ]


class Killed(BaseException):
    """Nothing catches it: the disk is left as a kill would leave it."""


def killed_while_replacing(rank, world, folder):
    """Save a step for the second time and die between moving the old one away and the new one
    in.
    """
    start()
    checkpoint.save(Engine(), folder, {}, {**progress(1), "which": "first"})
    original, calls = os.rename, []

    def die(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        original(*args)

    os.rename = die
    try:
        checkpoint.save(Engine(), folder, {}, {**progress(1), "which": "second"})
    except Killed:
        pass
    finally:
        os.rename = original
    found = find(folder)
    manifest = read_manifest(found)
    verify(found, manifest["files"])
    for _ in range(2):  # the second time, with a leftover of the name that the old one is moved to
        checkpoint.save(Engine(), folder, {}, {**progress(1), "which": "third"})
        left = sorted(os.listdir(folder))
        os.makedirs(f"{folder}/.unfinished-replaced-step00000001/x")
    return manifest["progress"]["which"], read_manifest(find(folder))["progress"]["which"], left


def test_keep_last_counts_by_time_of_writing(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), [5, 7, 9], 2)
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step00000007", "step00000009"]
    run_ranks(2, save_steps, str(tmp_path), [2, 7], 2)  # started anew: step 9 is the oldest now
    assert sorted(p.name for p in tmp_path.glob("*")) == ["latest", "step00000002", "step00000007"]
    assert (tmp_path / "latest").read_text() == "step00000007"
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_kill_while_a_step_is_saved_again_leaves_the_old_one(tmp_path):
    assert run_ranks(1, killed_while_replacing, str(tmp_path)) == [
        ("first", "third", ["latest", "step00000001"])
    ]


def test_find(tmp_path):
    assert find(tmp_path) is None
    assert checkpoint.require_loadable("auto", str(tmp_path)) is None
    assert checkpoint.require_loadable(None, str(tmp_path)) is None
    with pytest.raises(ValueError, match="--load: got .*accepted: a folder with a file `latest`"):
        checkpoint.require_loadable(str(tmp_path), None)
    (tmp_path / "step00000003").mkdir()
    (tmp_path / "latest").write_text("step00000003\n")
    with pytest.raises(
        CheckpointError, match="names 'step00000003', which is no checkpoint; there are: none"
    ):
        find(tmp_path)
    manifest = tmp_path / "step00000003" / "manifest.json"
    manifest.write_text('{"format": 1}')
    assert find(tmp_path) == find(tmp_path / "step00000003") == tmp_path / "step00000003"
    for content in ('{"format": 2}', "[]", "{"):
        manifest.write_text(content)
        with pytest.raises(CheckpointError, match=r"manifest.json: (format|cannot be read)"):
            read_manifest(tmp_path / "step00000003")


def test_a_damaged_manifest_is_one_line(tmp_path):
    good = {"format": 1, "progress": {"step": 3}, "run": {}, "files": {"a": [1, 2]}}
    for key, values in {"progress": ("", 1), "run": (1, []), "files": ([], "a")}.items():
        rest = {k: v for k, v in good.items() if k != key}
        for damaged in (rest, *({**rest, key: value} for value in values)):
            (tmp_path / "manifest.json").write_text(json.dumps(damaged))
            with pytest.raises(
                CheckpointError, match=rf"^\S+manifest.json: is damaged, {key} missing"
            ):
                read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(good))
    assert read_manifest(tmp_path) == good


def test_differences_name_the_key():
    old = {
        "model": {"layers": 2, "eps": 1e-5},
        "deepspeed": {"coat": {"activation": {"bf16_layers": (1,)}}},
    }
    new = {
        "model": {"layers": 4, "eps": 1e-5},
        "deepspeed": {"coat": {"activation": {"bf16_layers": [1]}}},
        "seed": 3,
    }
    assert list(differences(old, new)) == ["model.layers", "seed"]
    assert differences(old, new)["model.layers"] == "model.layers: checkpoint has 2, this run has 4"
    assert differences(old, new)["seed"] == "seed: checkpoint has nothing, this run has 3"
