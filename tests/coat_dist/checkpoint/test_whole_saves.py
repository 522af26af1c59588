"""Saving: DeepSpeed's arguments, errors on all ranks, kills, every kind of engine, DeepSpeed's
own tools afterwards.
"""

import contextlib
import inspect
import io
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from unittest import mock

import torch

from tests.coat_dist.checkpoint.small_saves import Killed, fail, listed, small, step, weights
from tests.coat_dist.checkpoint.test_loading import build
from tests.coat_dist.checkpoint.test_whole import flip, told
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


def arguments(rank, world, folder):
    """DeepSpeed's arguments and defaults; what they write; tags; two ranks."""
    engine, said = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    original = type(engine).save_checkpoint
    same = inspect.signature(engine.save_checkpoint) == inspect.signature(original.__get__(engine))
    assert engine.save_checkpoint(folder) is True
    assert (
        listed(folder) == ["global_step1", "latest"]
        and Path(folder, "latest").read_text() == "global_step1"
    )
    files = json.loads(Path(folder, "global_step1", "manifest.json").read_text())["files"]
    for name, (size, checksum) in files.items():
        data = Path(folder, "global_step1", name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (size, checksum), name
    assert set(files) == set(listed(f"{folder}/global_step1")) - {"manifest.json"}
    state = {"universal_checkpoint_info": {"a": 1}, "x": 2}  # as Megatron-DeepSpeed passes it
    engine.save_checkpoint(folder, 7, state, False)
    assert state.items() <= engine.load_checkpoint(folder, 7)[1].items()
    for tag in ("", ".", "..", "/tmp/x", "a/b", "latest", ".lock", ".unfinished-a", " a", "a\n"):
        said[tag] = told(engine.save_checkpoint, folder, tag=tag)
    said["ranks"] = told(engine.save_checkpoint, folder, tag=f"rank{rank}")
    said["flags"] = told(engine.save_checkpoint, folder, save_latest=rank == 0)
    said["keys"] = told(
        engine.save_checkpoint, folder, client_state={"x": 1, "lr_scheduler": None} if rank else {}
    )
    said["list"] = told(engine.save_checkpoint, folder, client_state=[1])
    said["pickle"] = told(
        engine.save_checkpoint, folder, client_state={"f": (lambda: 0) if rank == 0 else 1}
    )
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
    assert same and left == ["7", "global_step1", "latest"]
    special = {"ranks", "flags", "keys", "list", "pickle", "file", "hook", "load"}
    start = "CheckpointError: tag: got {!r}, accepted: "
    assert all(
        text.startswith(start.format(tag)) and text.count("tag: got") == 1
        for tag, text in said.items()
        if tag not in special
    )
    assert (
        "tag: got 'rank0' on rank 0; 'rank1' on rank 1, accepted: the same on all ranks"
        in said["ranks"]
    )
    assert (
        "save_latest: got True on rank 0; False on rank 1, accepted: the same on all ranks"
        in said["flags"]
    )
    assert said["keys"].startswith(
        "CheckpointError: client_state: got keys lr_scheduler, which DeepSpeed writes itself"
    )
    assert said["list"].startswith("CheckpointError: AttributeError")
    assert "rank 0: " in said["pickle"] and "mp_rank_00_model_states.pt" in said["pickle"]
    assert f"cannot write {__file__}" in said["file"]
    assert "rank 1: " in said["hook"] and "KeyError: 'of one rank'" in said["hook"]
    assert said["load"].startswith("CheckpointError: tag: got '', which is not the name of")


def full(problem):
    def save(state, path, *args, **kwargs):
        Path(path).write_bytes(b"PK")
        raise problem

    return save


def no_room(rank, world, folder):
    """A disk that is full from the second save on, on rank 1 alone."""
    engine = build(CASES["zero-2"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="x")
    before = snapshot(engine)
    states = {name: Path(folder, name).stat().st_mtime_ns for name in ("x/manifest.json", "latest")}
    run(engine, rank, 1, 2)
    said = []
    for tag, problem in (
        ("x", OSError(28, "No space left on device")),
        ("y", RuntimeError("unexpected pos 64 vs 0")),
    ):
        with (
            mock.patch.object(torch, "save", full(problem))
            if rank == 1
            else contextlib.nullcontext()
        ):
            said.append(told(engine.save_checkpoint, folder, tag=tag))
    torch.distributed.barrier()
    left = listed(folder)
    kept = states == {n: Path(folder, n).stat().st_mtime_ns for n in states}
    engine.load_checkpoint(folder)
    wrong = changes(before, snapshot(engine))
    assert engine.save_checkpoint(folder, tag="y") is True
    size = sum(path.stat().st_size for path in Path(folder, "x").glob("*.pt"))
    return said, left, kept, wrong, listed(folder), size


def test_a_full_disk_is_told_on_every_rank(tmp_path):
    folder = tmp_path / "save"
    for said, left, kept, wrong, after, size in run_ranks(2, no_room, str(folder)):
        for text in said:
            assert "No space left on device" in text and "unexpected pos" not in text
            needed, free = re.search(
                r"save: ([0-9,]+) bytes are needed, ([0-9,]+) were free$", text
            ).groups()
            assert 0.8 < int(needed.replace(",", "")) / size < 1 and int(free.replace(",", "")) > 0
            assert text.startswith("CheckpointError: cannot write ")
            assert "rank 1: " in text and "rank 0" not in text.split("optim_states")[0]
        assert (left, kept, wrong, after) == (["latest", "x"], True, [], ["latest", "x", "y"])


def killed(rank, world, folder):
    """Die at every rename, replace, sync and opening of a save, of a new tag and of one that is
    there.
    """
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
    from coat_dist.checkpoint.read.load_checks import load_whole_checkpoints
    from coat_dist.checkpoint.save import save_whole_checkpoints

    wrong = []

    def there_and_back(name, engine):
        where = f"{folder}/{name}"
        step(engine)
        before = weights(engine)
        engine.save_checkpoint(where)
        step(engine)
        engine.load_checkpoint(where)
        wrong.extend([name] * (not all(map(torch.equal, before, weights(engine)))))
        flip(flipped := next(Path(where).glob("*/*_states.pt")))
        wrong.extend(
            [f"{name}: damaged"] * (str(flipped) not in str(told(engine.load_checkpoint, where)))
        )
        engine.destroy()

    there_and_back("fp32, stage 0", small({}))
    there_and_back("fp32, stage 2", small({"zero_optimization": {"stage": 2}}))
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    there_and_back(
        "older format", small({**bf16, "checkpoint": {"checkpoint_serialization": False}})
    )
    config = {"train_micro_batch_size_per_gpu": 2, **bf16}
    net = torch.nn.Linear(128, 128)
    other = coat_dist.initialize(
        model=net, config=config, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01)
    )[0]
    save_whole_checkpoints(other)
    load_whole_checkpoints(other)
    step(other)
    other.save_checkpoint(f"{folder}/other")
    there_and_back("torch's AdamW", other)
    net = torch.nn.Linear(128, 128)
    ours = coat_dist.CoatAdamW(net.parameters(), lr=0.01)
    there_and_back("a CoatAdamW", coat_dist.initialize(model=net, config=config, optimizer=ours)[0])

    engine = small(bf16)
    step(engine)
    engine.save_checkpoint(folder, tag="tools")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    refused = told(engine.load_checkpoint, f"{folder}/other")
    wrong.extend(
        [refused]
        * ("optimizer.type: checkpoint has 'AdamW', this run has 'CoatAdamW'" not in refused)
    )
    masters = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    wrong.extend(["zero_to_fp32"] * (not torch.equal(state["weight"], masters)))
    wrong.extend(["script"] * (not os.access(f"{folder}/zero_to_fp32.py", os.X_OK)))
    before = weights(engine)
    step(engine)
    type(engine).load_checkpoint(engine, folder)  # DeepSpeed's own
    wrong.extend(["DeepSpeed's own loading"] * (not all(map(torch.equal, before, weights(engine)))))
    os.remove(f"{folder}/tools/manifest.json")  # as of plain DeepSpeed
    with contextlib.redirect_stderr(io.StringIO()) as notes:
        engine.load_checkpoint(folder)
    note = f"note: {folder}/tools has no manifest.json: it is loaded unverified\n"
    wrong.extend(["note"] * (notes.getvalue().count(note) != 1))
    wrong.extend(["unverified"] * (not all(map(torch.equal, before, weights(engine)))))
    model = Path(folder, "tools", "mp_rank_00_model_states.pt")
    os.truncate(model, model.stat().st_size - 30)
    cut = str(told(engine.load_checkpoint, folder))
    wrong.extend(["unverified, cut"] * (f"{model}: cannot be read" not in cut))
    return wrong


def test_every_kind_of_engine(tmp_path):
    assert run_ranks(1, kinds, str(tmp_path)) == [[]]


def without_frozen(rank, world, folder):
    """Names in the model's file, with and without frozen parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    net[0].requires_grad_(False)
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, net)
    names = []
    for exclude in (False, True):
        engine.save_checkpoint(folder, tag="x", exclude_frozen_parameters=exclude)
        names.append(
            sorted(
                torch.load(f"{folder}/x/mp_rank_00_model_states.pt", weights_only=False)["module"]
            )
        )
    return names


def test_frozen_parameters_are_left_out(tmp_path):
    trained = ["1.bias", "1.weight"]
    assert run_ranks(1, without_frozen, str(tmp_path)) == [
        [["0.bias", "0.weight", *trained], trained]
    ]
