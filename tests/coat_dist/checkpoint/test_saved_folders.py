"""What a folder of checkpoints holds: tags, what `latest` names, what a kill left, and what is not ours."""

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.save import Extras
from coat_dist.checkpoint.write.publish import find
from tests.coat_dist.checkpoint.small_saves import Killed, listed, small, step
from tests.coat_dist.checkpoint.test_whole import told
from tests.support import run_ranks


def beside(rank, world, folder):
    """Files that somebody put beside a checkpoint's stay when it is saved again."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    for _ in range(2):
        engine.save_checkpoint(folder, tag="x")
        Path(folder, "x", "mine").mkdir(exist_ok=True)
        Path(folder, "x", "mine", "tokenizer.json").write_text("mine")
        if not os.path.lexists(f"{folder}/x/mine/data"):
            os.symlink("/", f"{folder}/x/mine/data")
    os.mkdir(f"{folder}/.unfinished-thoughts")
    engine.save_checkpoint(folder, tag="x")
    assert os.readlink(f"{folder}/x/mine/data") == "/"
    os.remove(f"{folder}/latest")
    path = engine.load_checkpoint(folder)[0]
    os.rename(f"{folder}/x", f"{folder}/.unfinished-replaced-x")
    return path, engine.load_checkpoint(folder)[0], engine.load_checkpoint(folder, "x")[0], listed(folder)


def test_what_is_not_ours_stays_and_what_a_kill_left_is_found(tmp_path):
    path, replaced, by_tag, left = run_ranks(1, beside, str(tmp_path))[0]
    assert path == f"{tmp_path}/x/mp_rank_00_model_states.pt"
    assert replaced == by_tag == f"{tmp_path}/.unfinished-replaced-x/mp_rank_00_model_states.pt"
    assert (tmp_path / ".unfinished-replaced-x" / "mine" / "tokenizer.json").read_text() == "mine"
    assert left == [".unfinished-replaced-x", ".unfinished-thoughts"]


def beside_at_odds(rank, world, folder):
    """Beside a checkpoint whose manifest is damaged, and where the new one has a file of a folder's name."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    notes = Extras(add_files=lambda into: Path(into, "notes").write_text("of the program"))
    for tag, more in (("damaged", None), ("odd", notes)):
        engine.save_checkpoint(folder, tag)
        Path(folder, tag, "notes").mkdir()
        Path(folder, tag, "notes", "mine").write_text("mine")
        if tag == "damaged":
            Path(folder, tag, "manifest.json").write_text("{")
            Path(folder, tag, "zero_pp_rank_9_mp_rank_00_optim_states.pt").write_text("of more ranks")
        for _ in range(2):
            engine.save_checkpoint(folder, tag, extras=more)
    mine = sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("mine"))
    return engine.load_checkpoint(folder, "damaged")[0], mine


def test_what_somebody_put_beside_stays_also_where_it_is_in_the_way(tmp_path):
    loaded, found = run_ranks(1, beside_at_odds, str(tmp_path))[0]
    assert loaded == f"{tmp_path}/damaged/mp_rank_00_model_states.pt"
    assert found == ["damaged/notes/mine", "odd.kept/notes/mine"]


def beside_others(rank, world, folder):
    """A folder that is not ours, one that cannot be opened, and an old checkpoint in a folder of its own."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    engine.save_checkpoint(folder, "step00000002")
    engine.save_checkpoint(f"{folder}/other", "step00000009")  # of a run of its own
    os.mkdir(f"{folder}/lost+found")
    os.remove(f"{folder}/latest")
    found = engine.load_checkpoint(folder)[0]
    with mock.patch.object(os, "stat", side_effect=without("lost+found")):
        assert engine.load_checkpoint(folder)[0] == found
    said = []
    for name in ("gone", "lost+found"):
        Path(folder, "latest").write_text(name)
        said.append(told(engine.load_checkpoint, folder))
    Path(folder, "latest").write_text("other/step00000009")  # as a tag of two parts was written once
    return found, said, engine.load_checkpoint(folder)[0]


def without(name, stat=os.stat):
    """``os.stat`` where a folder of this name belongs to somebody else."""

    def refusing(path, *args, **kwargs):
        if f"/{name}/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **kwargs)

    return refusing


def test_only_the_folders_own_checkpoints_are_found_without_latest(tmp_path):
    found, said, nested = run_ranks(1, beside_others, str(tmp_path))[0]
    assert found == f"{tmp_path}/step00000002/mp_rank_00_model_states.pt"
    for name, text in zip(("gone", "lost+found"), said, strict=True):
        start = f"{tmp_path}/latest: got {name!r}, which is no checkpoint in {tmp_path}, accepted: step00000002"
        assert text == f"CheckpointError: {start}"
    assert nested == f"{tmp_path}/other/step00000009/mp_rank_00_model_states.pt"


def test_the_program_and_the_engine_mean_the_same_checkpoint(tmp_path):
    """Without `latest`: the one that was saved last, also under the name that it has while it is saved again."""
    for name, saved in (("step00000009", 1.0), ("step00000005", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"saved": saved}))
    assert find(tmp_path).name == "step00000005"
    os.rename(tmp_path / "step00000005", tmp_path / ".unfinished-replaced-step00000005")
    assert find(tmp_path).name == ".unfinished-replaced-step00000005"
    assert find(tmp_path / "step00000005") == find(tmp_path)
    (tmp_path / "step00000009" / "manifest.json").write_text(json.dumps({"saved": 3.0, "latest": False}))
    assert find(tmp_path).name == ".unfinished-replaced-step00000005"
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find(tmp_path)


def unpublished(rank, world, folder):
    """What each load finds where saves were cut, or did not change ``latest``; and what a link leads to."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    found = {}
    with mock.patch.object(os, "rename", side_effect=Killed), contextlib.suppress(Killed):
        engine.save_checkpoint(f"{folder}/first", tag="t")  # written, and never given its name
    found["manifest"] = Path(folder, "first", ".unfinished-t", "manifest.json").is_file()
    found["first"] = engine.load_checkpoint(f"{folder}/first")

    for i in (1, 2, 3):
        engine.save_checkpoint(f"{folder}/kept", f"step0000000{i}", save_latest=i == 1, extras=Extras(keep_last=1))
    found["kept"] = [name for name in listed(f"{folder}/kept") if name.startswith("step")]
    found["latest"] = engine.load_checkpoint(f"{folder}/kept")[0]

    engine.save_checkpoint(f"{folder}/linked", tag="t")
    os.mkdir(f"{folder}/elsewhere")
    os.rename(f"{folder}/linked/t", f"{folder}/elsewhere/t")
    Path(folder, "elsewhere", "t", "mine").write_text("mine")
    os.symlink(f"{folder}/elsewhere/t", f"{folder}/linked/t")
    there = sorted(os.listdir(f"{folder}/elsewhere/t"))
    for _ in range(3):
        step(engine)
        engine.save_checkpoint(f"{folder}/linked", tag="t")
    found["behind the link"] = sorted(os.listdir(f"{folder}/elsewhere/t")) == there
    found["left"] = [name for name in os.listdir(f"{folder}/linked") if name.startswith(".")]
    return found


def test_what_was_never_published_is_not_loaded_and_what_is_published_stays(tmp_path):
    (found,) = run_ranks(1, unpublished, str(tmp_path))
    assert found["manifest"] and found["first"] == (None, None)
    assert found["kept"] == ["step00000001", "step00000003"]
    assert found["latest"] == f"{tmp_path}/kept/step00000001/mp_rank_00_model_states.pt"
    assert found["behind the link"] and found["left"] == []
