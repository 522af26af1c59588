"""Saving: DeepSpeed's arguments, errors on all ranks, kills, every kind of engine, DeepSpeed's own tools afterwards."""

import contextlib
import inspect
import io
import json
import os
import shutil
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.checkpoint.publish import find
from coat_dist.checkpoint.save import Extras
from tests.coat_dist.checkpoint.test_loading import build
from tests.coat_dist.checkpoint.test_whole import told
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks

ONE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
}


def small(config, **more):
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    return coat_dist.initialize(model=torch.nn.Linear(128, 128), config={**ONE, **config}, **more)[0]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 128, dtype=dtype)).float().square().mean())
    engine.step()


def weights(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


def listed(folder):
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith("zero_to_"))


class Killed(BaseException):
    pass


def fail(*args):
    raise KeyError("of one rank")


def arguments(rank, world, folder):
    """DeepSpeed's arguments and defaults; what they write; tags; two ranks."""
    engine, said = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    original = type(engine).save_checkpoint
    same = inspect.signature(engine.save_checkpoint) == inspect.signature(original.__get__(engine))
    assert engine.save_checkpoint(folder) is True
    assert listed(folder) == ["global_step1", "latest"] and Path(folder, "latest").read_text() == "global_step1"
    files = json.loads(Path(folder, "global_step1", "manifest.json").read_text())["files"]
    for name, (size, checksum) in files.items():
        data = Path(folder, "global_step1", name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (size, checksum), name
    assert set(files) == set(listed(f"{folder}/global_step1")) - {"manifest.json"}
    engine.save_checkpoint(folder, 7, {"x": 1}, False)
    engine.save_checkpoint(folder, tag="a/b")
    assert Path(folder, "latest").read_text() == "a/b" and listed(f"{folder}/a") == ["b"]
    assert engine.load_checkpoint(folder, 7)[1]["x"] == 1
    for tag in (
        "",
        ".",
        "..",
        "a/../b",
        "/tmp/x",
        "a//b",
        "latest",
        ".unfinished-a",
        " a",
        "a\n",
        "a/latest",
        "a/b/c/d/e",
    ):
        said[tag] = told(engine.save_checkpoint, folder, tag=tag)
    said["ranks"] = told(engine.save_checkpoint, folder, tag=f"rank{rank}")
    said["dir"] = told(engine.save_checkpoint, "")
    said["state"] = told(engine.save_checkpoint, folder, client_state=[1])
    said["pickle"] = told(engine.save_checkpoint, folder, client_state={"f": (lambda: 0) if rank == 0 else 1})
    said["file"] = told(engine.save_checkpoint, __file__)
    with contextlib.ExitStack() as hooked:
        if rank == 1:
            hooked.callback(engine.module.register_state_dict_post_hook(fail).remove)
        said["hook"] = told(engine.save_checkpoint, folder)
    said["load"] = told(engine.load_checkpoint, folder, "")
    torch.distributed.barrier()
    return same, said, listed(folder)


def test_arguments_are_deepspeeds(tmp_path):
    first, second = run_ranks(2, arguments, str(tmp_path / "save"))
    assert first == second
    same, said, left = first
    assert same and left == ["7", "a", "global_step1", "latest"]
    special = {"ranks", "dir", "state", "pickle", "file", "hook", "load"}
    start = "CheckpointError: tag: got {!r}, accepted: "
    assert all(
        text.startswith(start.format(tag)) and text.count("tag: got") == 1
        for tag, text in said.items()
        if tag not in special
    )
    assert "tag: got 'rank0' on rank(s) 0; 'rank1' on rank(s) 1, accepted: the same on all ranks" in said["ranks"]
    assert "save_dir: got '', accepted" in said["dir"] and "client_state: got list, accepted: a dict" in said["state"]
    assert "rank 0: " in said["pickle"] and "mp_rank_00_model_states.pt" in said["pickle"]
    assert f"cannot write {__file__}" in said["file"]
    assert "rank 1: " in said["hook"] and "KeyError: 'of one rank'" in said["hook"]
    assert said["load"].startswith("CheckpointError: tag: got '', accepted: None for ")


def no_room(rank, world, folder):
    """A disk that is full from the second save on, on rank 1 alone."""
    engine = build(CASES["zero-2"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="x")
    before = snapshot(engine)
    states = {name: Path(folder, name).stat().st_mtime_ns for name in ("x/manifest.json", "latest")}
    run(engine, rank, 1, 2)
    from coat_dist.checkpoint import summed_file

    class Full(summed_file.SummedFile):
        def _write(self, view):
            self._problem = self._problem or OSError(28, "No space left on device")

    from coat_dist.checkpoint import engine_writes

    engine_writes.SummedFile = Full if rank == 1 else summed_file.SummedFile
    said = [told(engine.save_checkpoint, folder, tag=tag) for tag in ("x", "y")]
    engine_writes.SummedFile = summed_file.SummedFile
    torch.distributed.barrier()
    left = listed(folder)
    kept = states == {n: Path(folder, n).stat().st_mtime_ns for n in states}
    engine.load_checkpoint(folder)
    wrong = changes(before, snapshot(engine))
    assert engine.save_checkpoint(folder, tag="y") is True
    return said, left, kept, wrong, listed(folder)


def test_a_full_disk_is_told_on_every_rank(tmp_path):
    folder = tmp_path / "save"
    for said, left, kept, wrong, after in run_ranks(2, no_room, str(folder)):
        for text in said:
            assert text.startswith("CheckpointError: cannot write ") and "No space left on device" in text
            assert "rank 1: " in text and "rank 0" not in text.split("optim_states")[0]
            assert f"\n{folder}: " in text and " bytes are needed, " in text and " are free" in text
        assert (left, kept, wrong, after) == (["latest", "x"], True, [], ["latest", "x", "y"])


def killed(rank, world, folder):
    """Die at every rename, replace, sync and opening of a save, of a new tag and of one that is there."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    step(engine)
    engine.save_checkpoint(folder, tag="a")
    old, wrong, points = weights(engine), [], 0
    step(engine)
    new = weights(engine)
    shutil.copytree(folder, f"{folder}.old")
    for tag in ("a", "b"):
        for name in ("rename", "replace", "fsync", "mkdir"):
            nth, done = 0, False
            while not done:
                nth, calls, original = nth + 1, [], getattr(os, name)

                def die(*args, calls=calls, original=original, nth=nth, **kwargs):
                    calls.append(args)
                    if len(calls) == nth:
                        raise Killed
                    return original(*args, **kwargs)

                setattr(os, name, die)
                try:
                    engine.save_checkpoint(folder, tag=tag)
                    done = True
                except Killed:
                    points += 1
                finally:
                    setattr(os, name, original)
                path, _ = engine.load_checkpoint(folder)
                got = weights(engine)
                if path is None or not any(all(map(torch.equal, got, one)) for one in (old, new)):
                    wrong.append(f"{tag}, {name} {nth}: {path}")
                engine.save_checkpoint(folder, tag="c")
                if ".unfinished" in " ".join(listed(folder)):
                    wrong.append(f"{tag}, {name} {nth}: left {listed(folder)}")
                shutil.rmtree(folder)
                shutil.copytree(f"{folder}.old", folder)
    return wrong, points


def test_a_kill_anywhere_leaves_a_checkpoint_that_loads(tmp_path):
    ((wrong, points),) = run_ranks(1, killed, str(tmp_path / "save"))
    assert wrong == [] and points >= 25


def kinds(rank, world, folder):
    """Engines of every kind: save, train on, load, compare; with either format of torch's."""
    import deepspeed

    import coat_dist

    wrong = []

    def there_and_back(name, engine):
        where = f"{folder}/{name}"
        step(engine)
        before = weights(engine)
        engine.save_checkpoint(where)
        step(engine)
        engine.load_checkpoint(where)
        wrong.extend([name] * (not all(map(torch.equal, before, weights(engine)))))
        flipped = next(p for p in Path(where).glob("*/*_states.pt"))
        data = bytearray(flipped.read_bytes())
        data[-9] ^= 1
        flipped.write_bytes(data)
        wrong.extend([f"{name}: damaged"] * (str(flipped) not in str(told(engine.load_checkpoint, where))))
        engine.destroy()

    there_and_back("fp32, stage 0", small({}))
    there_and_back("fp32, stage 2", small({"zero_optimization": {"stage": 2}}))
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    there_and_back("older format", small({**bf16, "checkpoint": {"checkpoint_serialization": False}}))
    config = {"train_micro_batch_size_per_gpu": 2, **bf16, "coat": {"activation": {"enabled": False}}}
    net = torch.nn.Linear(128, 128)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    there_and_back("a block beside torch's AdamW", coat_dist.initialize(model=net, config=config, optimizer=adam)[0])
    net = torch.nn.Linear(128, 128)
    other = coat_dist.initialize(model=net, config=config, optimizer=torch.optim.AdamW(net.parameters()))[0]
    step(other)
    other.save_checkpoint(f"{folder}/other")
    other.destroy()
    net = torch.nn.Linear(128, 128)
    ours = coat_dist.CoatAdamW(net.parameters(), lr=0.01)
    config.pop("coat")
    there_and_back("a CoatAdamW", coat_dist.initialize(model=net, config=config, optimizer=ours)[0])

    engine = small(bf16)
    step(engine)
    engine.save_checkpoint(folder, tag="tools")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    refused = told(engine.load_checkpoint, f"{folder}/other")
    wrong.extend([refused] * ("optimizer.type: checkpoint has states of another optimizer" not in refused))
    masters = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    wrong.extend(["zero_to_fp32"] * (not torch.equal(state["weight"], masters)))
    wrong.extend(["script"] * (not os.access(f"{folder}/zero_to_fp32.py", os.X_OK)))
    os.remove(f"{folder}/tools/manifest.json")  # as of plain DeepSpeed
    before = weights(engine)
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        engine.load_checkpoint(folder)
    note = f"note: {folder}/tools has no manifest.json: it is loaded unverified\n"
    wrong.extend(["note"] * (notes.getvalue().count(note) != 1))
    wrong.extend(["unverified"] * (not all(map(torch.equal, before, weights(engine)))))
    model = Path(folder, "tools", "mp_rank_00_model_states.pt")
    os.truncate(model, model.stat().st_size - 30)
    cut = str(told(engine.load_checkpoint, folder))
    wrong.extend(["unverified, cut"] * (f"{model}: is damaged or cut off" not in cut))
    return wrong


def test_every_kind_of_engine(tmp_path):
    assert run_ranks(1, kinds, str(tmp_path)) == [[]]


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


def in_folders(rank, world, folder):
    """Tags as "a/b": what `latest` names stays, and is found without it."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    engine.save_checkpoint(folder, "a/step00000001", extras=Extras(keep_last=1))
    engine.save_checkpoint(folder, "a/step00000002", save_latest=False, extras=Extras(keep_last=1))
    kept = listed(f"{folder}/a"), engine.load_checkpoint(folder)[0]
    engine.save_checkpoint(f"{folder}/other", "step00000009")  # of a run of its own
    os.mkdir(f"{folder}/lost+found")
    os.remove(f"{folder}/latest")
    found = engine.load_checkpoint(folder)[0]
    with mock.patch.object(os, "stat", side_effect=without("lost+found")):
        assert engine.load_checkpoint(folder)[0] == found
    Path(folder, "latest").write_text("gone")
    said = [told(engine.load_checkpoint, folder)]
    said += [told(engine.save_checkpoint, folder, tag) for tag in ("a", "a/step00000001/b", "a/step00000002/b/c")]
    Path(folder, "latest").write_text("lost+found")
    return *kept, found, [*said, told(engine.load_checkpoint, folder)]


def without(name, stat=os.stat):
    """``os.stat`` where a folder of this name belongs to somebody else."""

    def refusing(path, *args, **kwargs):
        if f"/{name}/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **kwargs)

    return refusing


def test_tags_in_folders(tmp_path):
    kept, loaded, found, said = run_ranks(1, in_folders, str(tmp_path))[0]
    assert kept == ["step00000001", "step00000002"]
    assert loaded == found == f"{tmp_path}/a/step00000001/mp_rank_00_model_states.pt"
    gone, outer, inner, deeper, empty = said
    assert gone.endswith("load a checkpoint by its tag: a/step00000001, a/step00000002")
    assert "tag: got 'a', in which the checkpoint 'a/step00000001' lies, accepted: one beside that" in outer
    assert "tag: got 'a/step00000001/b', which lies in the checkpoint 'a/step00000001', accepted: one beside" in inner
    assert "which lies in the checkpoint 'a/step00000002', " in deeper
    assert "latest: names 'lost+found', which is empty; load a checkpoint by its tag: " in empty


def two_latests(rank, world, folder):
    """A folder of checkpoints within another one's: what either ``latest`` names stays."""
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    step(engine)
    engine.save_checkpoint(f"{folder}/a", "step00000001", extras=Extras(keep_last=1))
    engine.save_checkpoint(folder, "a/step00000002", extras=Extras(keep_last=1))
    engine.save_checkpoint(folder, "a/step00000003", save_latest=False, extras=Extras(keep_last=1))
    return engine.load_checkpoint(f"{folder}/a")[0], engine.load_checkpoint(folder)[0]


def test_what_any_latest_names_stays(tmp_path):
    inner, outer = run_ranks(1, two_latests, str(tmp_path))[0]
    assert inner == f"{tmp_path}/a/step00000001/mp_rank_00_model_states.pt"
    assert outer == f"{tmp_path}/a/step00000002/mp_rank_00_model_states.pt"


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


@pytest.mark.parametrize("key", ["checkpoint.writer", "datastates_ckpt"])
def test_writers_behind_a_saves_back_are_refused(key):
    from coat_dist import CoatConfigError
    from coat_dist.deepspeed.refusals import check_deepspeed

    more = {"checkpoint": {"writer": {"type": "fast"}}} if key == "checkpoint.writer" else {key: {"host_cache_size": 1}}
    with pytest.raises(CoatConfigError, match=f"^{key}: got "):
        check_deepspeed({**ONE, **more})
