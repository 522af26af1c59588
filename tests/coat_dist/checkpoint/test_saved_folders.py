"""What a folder of checkpoints holds: what `latest` names, what a kill left, and what is not
ours.
"""

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.save import Extras
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.checkpoint.write.publish import begin, find, finish, retire, unfinished
from launch.common.lock import LOCK, locked
from tests.coat_dist.checkpoint.small_saves import listed, small, step
from tests.support import run_ranks

BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def beside(rank, world, folder):
    """Files that somebody put beside a checkpoint's stay when it is saved again, and so does
    what others made.
    """
    engine = small(BF16)
    step(engine)
    for _ in range(2):
        engine.save_checkpoint(folder, tag="x")
        Path(folder, "x", "mine").mkdir(exist_ok=True)
        Path(folder, "x", "mine", "tokenizer.json").write_text("mine")
    os.mkdir(f"{folder}/.unfinished-thoughts")
    Path(folder, ".unfinished-thoughts", "mine").write_text("mine")
    Path(folder, "y").mkdir()
    engine.save_checkpoint(folder, tag="y")
    engine.save_checkpoint(folder, tag="x")
    os.remove(f"{folder}/latest")
    path = engine.load_checkpoint(folder)[0]
    os.rename(f"{folder}/x", f"{folder}/.unfinished-replaced-x")
    return (
        path,
        engine.load_checkpoint(folder)[0],
        engine.load_checkpoint(folder, "x")[0],
        listed(folder),
    )


def test_what_is_not_ours_stays_and_what_a_kill_left_is_found(tmp_path):
    path, replaced, by_tag, left = run_ranks(1, beside, str(tmp_path))[0]
    assert path == f"{tmp_path}/x/mp_rank_00_model_states.pt"
    assert replaced == by_tag == f"{tmp_path}/.unfinished-replaced-x/mp_rank_00_model_states.pt"
    assert (tmp_path / ".unfinished-replaced-x" / "mine" / "tokenizer.json").read_text() == "mine"
    assert left == [".unfinished-replaced-x", ".unfinished-thoughts", "y", "y.kept"]


def beside_at_odds(rank, world, folder):
    """Beside a checkpoint whose manifest is damaged, and where the new one has a file of a
    folder's name.
    """
    engine = small(BF16)
    step(engine)
    notes = Extras(add_files=lambda into: Path(into, "notes").write_text("of the program"))
    for tag, more in (("damaged", None), ("odd", notes)):
        engine.save_checkpoint(folder, tag)
        Path(folder, tag, "notes").mkdir()
        Path(folder, tag, "notes", "mine").write_text("mine")
        if tag == "damaged":
            Path(folder, tag, "manifest.json").write_text("{")
        for _ in range(2):
            engine.save_checkpoint(folder, tag, extras=more)
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("mine"))


def test_what_somebody_put_beside_stays_also_where_it_is_in_the_way(tmp_path):
    assert run_ranks(1, beside_at_odds, str(tmp_path)) == [
        ["damaged.kept/notes/mine", "odd.kept/notes/mine"]
    ]


SCRIPT = "zero_to_fp32.py"
PLANTED = (
    ".latest.new",
    ".lock",
    ".unfinished-x",
    ".unfinished-replaced-x",
    ".unfinished-removed-x",
    SCRIPT,
)


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
def test_links_that_others_put_into_the_folder_are_not_followed(name, target, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    folder.mkdir()
    if target == "file":
        victim.write_text("precious")
    elif target == "folder":
        victim.mkdir()
        for one in ("notes", "manifest.json"):
            (victim / one).write_text('{"files": {}}')
    before = listed(tmp_path)
    for number, tag in enumerate(("x", "x", "x", "y")):
        if number == 1:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(victim)
        with contextlib.suppress(OSError), locked(folder / LOCK):
            begin(folder / tag)
            (folder / SCRIPT).write_text("as DeepSpeed copies it")
            finish(unfinished(folder / tag), folder / tag, {"files": {}})
            write_text(folder / "latest", tag)
            retire(folder, folder / tag)
    assert listed(tmp_path) == before
    if target == "file":
        assert victim.read_text() == "precious"
    elif target == "folder":
        assert listed(victim) == ["manifest.json", "notes"]


def test_the_program_and_the_engine_mean_the_same_checkpoint(tmp_path):
    """Without `latest`: the one that was saved last, also under the name that it has while it is
    saved again.
    """
    for name, saved in (("step00000009", 1.0), ("step00000005", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"saved": saved}))
    assert find(tmp_path).name == "step00000005"
    os.rename(tmp_path / "step00000005", tmp_path / ".unfinished-replaced-step00000005")
    assert find(tmp_path).name == ".unfinished-replaced-step00000005"
    assert find(tmp_path / "step00000005") == find(tmp_path)
    (tmp_path / "step00000009" / "manifest.json").write_text(
        json.dumps({"saved": 3.0, "latest": False})
    )
    assert find(tmp_path).name == ".unfinished-replaced-step00000005"
    (tmp_path / "latest").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find(tmp_path)


def unpublished(rank, world, folder):
    """What each load finds where saves were cut, or did not change ``latest``."""
    engine = small(BF16)
    step(engine)
    found = {}
    with (
        mock.patch.object(os, "rename", side_effect=KeyboardInterrupt),
        contextlib.suppress(KeyboardInterrupt),
    ):
        engine.save_checkpoint(f"{folder}/first", tag="t")  # written, and never given its name
    found["manifest"] = Path(folder, "first", ".unfinished-t", "manifest.json").is_file()
    found["first"] = engine.load_checkpoint(f"{folder}/first")
    for i in (1, 2, 3):
        engine.save_checkpoint(
            f"{folder}/kept", f"step0000000{i}", save_latest=i == 1, extras=Extras(keep_last=1)
        )
    found["kept"] = [name for name in listed(f"{folder}/kept") if name.startswith("step")]
    found["latest"] = engine.load_checkpoint(f"{folder}/kept")[0]
    return found


def test_what_was_never_published_is_not_loaded_and_what_is_published_stays(tmp_path):
    (found,) = run_ranks(1, unpublished, str(tmp_path))
    assert found["manifest"] and found["first"] == (None, None)
    assert found["kept"] == ["step00000001", "step00000003"]
    assert found["latest"] == f"{tmp_path}/kept/step00000001/mp_rank_00_model_states.pt"
