"""Every call that touches the disk fails in turn while a checkpoint is saved: a whole one is
there all the time.
"""

import errno
import importlib
import io
import os
import resource
import shutil

import pytest
import torch

from coat_dist.checkpoint.manifest import CheckpointError, read_manifest, verify
from coat_dist.checkpoint.write.engine_writes import watch_writes
from coat_dist.checkpoint.write.publish import find
from launch.train import checkpoint
from tests.launch.disk import PLACES, Failing
from tests.launch.saved_steps import Engine, progress, start
from tests.support import run_ranks


def which(folder):
    """What the checkpoint that ``find`` finds says of itself, after it was read as a load would."""
    found = find(folder)
    manifest = read_manifest(found)
    verify(found, manifest["files"])
    return manifest["progress"]["which"]


def attempt(folder, step, name):
    """Save; the error's text or None."""
    try:
        checkpoint.save(Engine(), folder, {}, {**progress(step), "which": name}, keep_last=1)
    except CheckpointError as problem:
        return str(problem)
    return None


def fail_everywhere(rank, world, folder, place, for_good, failing_rank, second):
    """Let the place fail at its first call, its second, ... until a save passes without; how
    often it failed.
    """
    folder += f"/{place}"
    nth = 0
    while True:
        nth += 1
        shutil.rmtree(folder, ignore_errors=True) if rank == 0 else None
        torch.distributed.barrier()
        assert attempt(folder, 1, "old") is None
        with Failing(place, nth if rank == failing_rank else 10**9, for_good) as failure:
            problem = attempt(folder, second, "new")
        torch.distributed.barrier()
        state = which(folder)
        everyone = [None] * world
        torch.distributed.all_gather_object(everyone, (problem is None, failure.failed > 0))
        assert len({passed for passed, _ in everyone}) == 1, (
            f"{place}, call {nth}: ranks differ: {everyone}"
        )
        if problem is not None:
            assert "Input/output error" in problem or "file write failed" in problem, problem
        else:
            assert state == "new", f"{place}, call {nth}"
        torch.distributed.barrier()
        assert attempt(folder, 3, "next") is None and which(folder) == "next"
        # Rank 0 removes.
        left = sorted(os.listdir(folder)) if rank == 0 else ["latest", "step00000003"]
        assert left == ["latest", "step00000003"], f"{place}, call {nth}: left {left}"
        torch.distributed.barrier()
        if not any(failed for _, failed in everyone):
            return nth - 1


@pytest.mark.parametrize(
    ("for_good", "second"),
    [
        (True, 2),
        (False, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 2), (True, 1))),
    ],
)
def test_an_error_anywhere_leaves_a_whole_checkpoint(tmp_path, for_good, second):
    """Also while a step is saved for the second time, with --keep-last 1."""
    times = run_ranks(1, all_places, str(tmp_path), for_good, 0, second)[0]
    for place in (
        "fsync",
        "rename",
        "replace",
        "open",
        "torch.save",
        "copyfile",
        "scandir",
        "listdir",
    ):
        assert times[place] >= 1, times
    assert times["fsync"] >= 5 and times["open"] >= 5


def all_places(rank, world, folder, for_good, failing_rank, second, places=tuple(PLACES)):
    start()
    return {
        p: fail_everywhere(rank, world, folder, p, for_good, failing_rank, second) for p in places
    }


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path):
    places = ("fsync", "open", "torch.save")
    for times in run_ranks(2, all_places, str(tmp_path), False, 1, 2, places):
        assert all(times[p] >= 1 for p in places), times


def real_engine(rank, world, folder):
    """DeepSpeed's own writing fails on one rank, once in its torch.save for want of room and
    once beside it.
    """
    import coat_dist

    import deepspeed  # isort: skip

    start()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {"activation": {"enabled": False}},
    }
    engine, *_ = coat_dist.initialize(model=torch.nn.Linear(256, 256), config=config)

    def save(step):
        try:
            return str(checkpoint.save(engine, folder, {}, progress(step), keep_last=1))
        except CheckpointError as problem:
            return str(problem)

    results = [save(1)]
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    results.append(save(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    module = importlib.import_module("deepspeed.runtime.engine")
    original, module.copyfile = module.copyfile, Failing("copyfile", 1, True)
    results.append(save(2))
    module.copyfile = original
    found = find(folder)
    verify(found, read_manifest(found)["files"])
    torch.distributed.barrier()
    return [*results, str(found), save(2)]


def test_an_error_in_deepspeeds_own_writing_is_an_error_on_all_ranks(tmp_path):
    one, two = (str(tmp_path / f"step0000000{i}") for i in (1, 2))
    for first, room, script, found, last in run_ranks(2, real_engine, str(tmp_path)):
        assert (first, found, last) == (one, one, two)
        unfinished = f"cannot write {tmp_path}/.unfinished-step00000002: "
        assert (
            room.startswith(f"{unfinished}rank 1: ")
            and "optim_states.pt" in room
            and "rank 0" not in room
        )
        assert script.startswith(f"{unfinished}rank 0: ") and "Input/output error" in script
    assert [p.name for p in tmp_path.glob("*step*")] == ["step00000002"]


def test_errors_name_the_file_however_deepspeed_passes_it():
    class Full:
        def save(self, state, path):
            raise RuntimeError("unexpected pos 4992 vs 4886")

        makedirs = _copy_recovery_script = _save_checkpoint = _save_zero_checkpoint = save

    engine = Full()
    engine.checkpoint_engine = Full()
    with watch_writes(engine) as writes:
        engine.checkpoint_engine.save({}, "a/model.pt")
        engine.checkpoint_engine.save({}, path="a/model.pt")
        engine.checkpoint_engine.save(state={}, path="a/model.pt")
    assert [str(e) for e in writes.errors] == ["a/model.pt: No space left on device"] * 3


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
        return attempt(folder, 1, "only"), which(folder)
    finally:
        os.fsync = original


def test_folders_that_cannot_be_synced_are_no_error(tmp_path):
    assert run_ranks(1, unsyncable_folders, str(tmp_path)) == [(None, "only")]


def bad_files(rank, world, folder):
    """A file that cannot be read is told from a missing and a damaged one; an empty new one is
    an error.
    """
    start()
    assert attempt(folder, 1, "old") is None
    found = find(folder)
    files = read_manifest(found)["files"]
    (found / "rank0.pt").unlink()
    (found / "script.py").write_text("changed")
    original = io.open

    def cannot(path, *args, **kwargs):
        if str(path).endswith("random_rank_00000.pt"):
            raise OSError(errno.EIO, "Input/output error")
        return original(path, *args, **kwargs)

    io.open = cannot
    try:
        verify(found, files)
    except CheckpointError as problem:
        said = str(problem)
    finally:
        io.open = original
    engine = Engine()
    engine._copy_recovery_script = lambda path: open(f"{path}/script.py", "w").close()
    try:
        checkpoint.save(engine, folder, {}, progress(2), keep_last=1)
    except CheckpointError as problem:
        return said, str(problem), sorted(n for n in os.listdir(folder) if not n.startswith("."))
    return None


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    said, empty, left = run_ranks(1, bad_files, str(tmp_path))[0]
    assert "rank0.pt: missing" in said and "script.py: damaged (is 7 bytes, was " in said
    assert "random_rank_00000.pt: cannot be read (" in said and "Input/output error" in said
    assert "step00000002/script.py: is empty" in empty and left == ["latest", "step00000001"]


def test_changed_bytes_are_not_said_to_be_a_length(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"abc")
    with pytest.raises(
        CheckpointError, match=r"x.pt: damaged \(its checksum is not that of the manifest\)"
    ):
        verify(tmp_path, {"x.pt": [3, 1]})
