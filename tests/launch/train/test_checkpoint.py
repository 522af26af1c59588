"""Checkpoints under kills and errors, with an engine that only writes a file."""

import errno
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


def test_keep_last_counts_by_time_of_writing(tmp_path):
    run_ranks(2, save_steps, str(tmp_path), [5, 7, 9], 2)
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step00000007", "step00000009"]
    run_ranks(2, save_steps, str(tmp_path), [2, 7], 2)  # started anew: step 9 is the oldest now
    assert sorted(p.name for p in tmp_path.glob("*")) == ["latest", "step00000002", "step00000007"]
    assert (tmp_path / "latest").read_text() == "step00000007"
    assert not list(tmp_path.glob(".unfinished*"))
    (tmp_path / "latest").write_text("step00000003\n")
    with pytest.raises(
        CheckpointError,
        match="names 'step00000003', which is no checkpoint; there are: step00000002, step00000007",
    ):
        find(tmp_path)


def test_a_damaged_manifest_is_one_line(tmp_path):
    good = {"format": 1, "progress": {"step": 3}, "run": {}, "files": {"a": [1, 2]}}
    for key, values in {"progress": ("", 1), "run": (1, []), "files": ([], "a")}.items():
        rest = {k: v for k, v in good.items() if k != key}
        for damaged in (rest, *({**rest, key: value} for value in values)):
            (tmp_path / "manifest.json").write_text(json.dumps(damaged))
            with pytest.raises(
                CheckpointError, match=rf"^\S+manifest.json: got no {key}, accepted: "
            ):
                read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**good, "format": 2}))
    with pytest.raises(CheckpointError, match="manifest.json: format: got another one"):
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


def unsyncable_folders(rank, world, folder):
    """A file system that cannot sync folders: EINVAL there, and only there."""
    start()
    original = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(descriptor)

    os.fsync = fsync
    try:
        checkpoint.save(Engine(), folder, {}, progress(1), keep_last=1)
        verify(find(folder), read_manifest(find(folder))["files"])
        return find(folder).name
    finally:
        os.fsync = original


def test_folders_that_cannot_be_synced_are_no_error(tmp_path):
    assert run_ranks(1, unsyncable_folders, str(tmp_path)) == ["step00000001"]


RUN = {
    "model": {"num_layers": 2},
    "parallel": {"data": 2},
    "deepspeed": {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW"},
        "coat": {"optimizer": {"stochastic_rounding": "auto", "first_moment": "e4m3"}},
    },
}
STAGE = "deepspeed.zero_optimization.stage"
KIND = "deepspeed.optimizer.type"
FORMAT = "deepspeed.coat.optimizer.first_moment"
ROUNDING = "deepspeed.coat.optimizer.stochastic_rounding"


def but(changes):
    """RUN with other values of dotted keys."""
    run = json.loads(json.dumps(RUN))
    for key, value in changes.items():
        *blocks, last = key.split(".")
        inner = run
        for block in blocks:
            inner = inner[block]
        inner[last] = value
    return run


@pytest.mark.parametrize(
    ("changes", "converted"),
    [
        ({ROUNDING: False}, []),  # no stored number depends on it
        ({ROUNDING: True, "parallel.data": 4}, ["parallel.data: checkpoint has 2, this run has 4"]),
        ({STAGE: 3}, [f"{STAGE}: checkpoint has 2, this run has 3"]),
        ({STAGE: 3, KIND: "AdamW", FORMAT: "int8"}, []),
        ({FORMAT: "int8"}, []),
        ({"model.num_layers": 4, STAGE: 3}, []),
    ],
)
def test_of_another_layout_says_what_auto_converts(changes, converted):
    assert checkpoint.of_another_layout({"run": RUN}, but(changes)) == converted
