"""The contract of damage: whatever happens to a save or to its files, a checkpoint that loads is
there, and nothing damaged is loaded.

Three tables, a case a row:

* ``LOADS``: what was done to the files of a checkpoint, and what loading says on every rank. It
  changes nothing, whatever the damage.
* ``SAVES``: what goes wrong on one rank during a save, and what saving says on every rank. The
  folder stays as it was, and the next save succeeds.
* ``KILLS``: calls that touch the disk, at which a save is killed, each in turn. What was saved last
  loads, and the next save leaves nothing of the killed one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coat_dist import shared_folders
from tests.coat_dist.checkpoint.small_saves import (
    build,
    flip,
    listed,
    on_rank_0,
    refused,
    small,
    step,
    told,
    weights,
)
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.launch.disk import PLACES, Failing
from tests.support import run_ranks


@dataclass(frozen=True)
class Load:
    """A damage, done on rank 0."""

    do: Callable[[Path], Any]
    """Gets the file that ``file`` names, or the folder of checkpoints."""
    says: str
    """What the error has in it; "{file}" is the file's path and "{root}" the folder's."""
    file: str = ""
    """A pattern in the folder of checkpoints, of which the first match is damaged."""
    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``load_checkpoint``; a list has the values of both ranks."""
    universal: bool = False
    """Load the universal checkpoint that was made of the newest one."""


def swap(path: Path) -> None:
    other = next(p for p in path.parent.glob("*optim_states.pt") if p != path)
    held = path.rename(path.with_name("x"))
    other.rename(path)
    held.rename(other)


def of_another_save(path: Path) -> None:
    shutil.copy(path.parents[1] / "a" / path.name, path)


def foreign(path: Path) -> None:
    shutil.copy(path, path.with_name(path.name.replace("rank_0", "rank_7")))


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def written(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


def without_manifest(path: Path, damage: Callable[[Path], Any]) -> None:
    damage(path)
    (path.parent / "manifest.json").unlink()


def another_step(path: Path) -> None:
    torch.save(torch.load(path) + 1, path)


def another_shape(path: Path) -> None:
    shutil.copy(path.parents[1] / "down.weight" / "fp32.pt", path)


OPTIMIZER, MODEL, MANIFEST = "b/*optim_states.pt", "b/*model_states.pt", "b/manifest.json"
DAMAGES = {
    "missing": Path.unlink,
    "empty": written(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 7),
    "flipped": flip,
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "a folder": a_folder,
}
LOADS = {
    f"{file[2:]} {way}": Load(damage, "{file}", file)
    for file in (OPTIMIZER, MODEL, MANIFEST)
    for way, damage in DAMAGES.items()
    if (file, way) not in ((MANIFEST, "missing"), (MANIFEST, "flipped"))
}
LOADS |= {
    "optimizer files swapped": Load(swap, "{file}: damaged", OPTIMIZER),
    "a file of another save": Load(of_another_save, "{file}: damaged", OPTIMIZER),
    "one file too many": Load(foreign, "is of another checkpoint", OPTIMIZER),
    "latest, empty": Load(written(b""), "{file}: ", "latest"),
    "latest, of nothing": Load(written(b"global_step99"), "{file}: ", "latest"),
    "latest, binary": Load(written(b"\xff\x00\xfe"), "{file}: ", "latest"),
    "latest, elsewhere": Load(written(b"../b"), "{file}: ", "latest"),
    "latest, unfinished": Load(written(b".unfinished-b"), "{file}: ", "latest"),
    "latest, two lines": Load(written(b"a\nb"), "{file}: ", "latest"),
    "latest, a folder": Load(a_folder, "{file}: ", "latest"),
    "an unfinished tag": Load(
        lambda folder: folder.rename(folder.with_name(".unfinished-b")),
        "tag: got '.unfinished-b'",
        "b",
        given={"tag": ".unfinished-b"},
    ),
    "no such tag": Load(lambda root: None, "tag: got 'c'", given={"tag": "c"}),
    "another tag on each rank": Load(
        lambda root: None,
        "tag: got 'a' on rank 0, 'b' on rank 1, accepted: the same on all ranks",
        given={"tag": ["a", "b"]},
    ),
    "plain DeepSpeed's, missing": Load(
        lambda path: without_manifest(path, Path.unlink),
        "{file}: missing\naccepted: what wrote it",
        "b/*rank_1_mp_rank_00_optim_states.pt",
    ),
    "plain DeepSpeed's, halved": Load(
        lambda path: without_manifest(path, halved), "{file}: cannot be read", OPTIMIZER
    ),
}
LOADS |= {
    f"universal {file} halved": Load(
        halved, "{file}: cannot be read", f"universal/zero/{file}", universal=True
    )
    for file in (
        *("rest.pt", "optimizer_state.pt", "extra_state.pt", "up.weight/step.pt"),
        *("up.bias/exp_avg.pt", "down.weight/codes.coat"),
    )
}
LOADS |= {
    "universal, another shape": Load(
        another_shape,
        "{file}: got shape [61, 129], accepted: one that gives [129, 47] on tensor-",
        "universal/zero/up.weight/exp_avg_sq.pt",
        universal=True,
    ),
    "universal, another step": Load(
        another_step,
        "got steps [2, 3] of",
        "universal/zero/norm.bias/step.pt",
        universal=True,
    ),
}


def damaged(rank, world, case, names, folder):
    """What loading says of each damage, and what is wrong besides."""
    from coat_dist import convert_to_universal

    engine, root, found = build(CASES[case]), Path(folder), {}
    engine.module.amaxes.value = torch.arange(4.0)
    run(engine, rank, 0, 1)
    assert engine.save_checkpoint(folder, "a", {"mine": 1}) is True
    run(engine, rank, 1, 2)
    saved = snapshot(engine)
    assert engine.save_checkpoint(str(root), "b", client_state={"mine": 2}) is True
    run(engine, rank, 2, 3)
    on_rank_0(rank, lambda: convert_to_universal(root / "b", root / "universal"))
    on_rank_0(rank, lambda: shutil.copytree(root, f"{root}.whole"))

    def restore():
        shutil.rmtree(root)
        shutil.copytree(f"{root}.whole", root)

    for name in names:
        row = LOADS[name]
        path = sorted(root.glob(row.file))[0] if row.file else root
        on_rank_0(rank, lambda row=row, path=path: row.do(path))
        given = {k: v[rank] if isinstance(v, list) else v for k, v in row.given.items()}
        if row.universal:
            given["tag"] = "universal"
        engine._config.load_universal_checkpoint = row.universal
        said = refused(engine, load_dir=folder, **given)
        text = row.says.format(file=path, root=root)
        found[name] = [] if text in said else [f"{text!r} is not in {said!r}"]
        on_rank_0(rank, restore)
    engine._config.load_universal_checkpoint = False
    on_rank_0(rank, (root / "latest").unlink)
    path, state = engine.load_checkpoint(folder)
    whole = changes(saved, snapshot(engine))
    if state.get("mine") != 2 or not path.startswith(f"{root}/b/"):
        whole.append(f"loaded {path}, {state.keys()}")
    if engine.load_checkpoint(f"{folder}-nowhere") != (None, None):
        whole.append("a folder that is not there")
    return found, whole


# Stages 1 and 2 write the same files.
@pytest.fixture(scope="module", params=["zero-2", "zero-3"])
def loads(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("damage") / "save")
    return run_ranks(2, damaged, request.param, list(LOADS), folder)


@pytest.mark.parametrize("name", LOADS)
def test_load_checkpoint_refuses_damage_on_every_rank(loads, name):
    assert [found[name] for found, _ in loads] == [[], []]


def test_load_checkpoint_loads_what_was_restored_without_latest(loads):
    assert [whole for _, whole in loads] == [[], []]


def full(problem: Exception) -> Callable[..., Any]:
    def write(state: Any, path: str, *args: Any, **kwargs: Any) -> None:
        Path(path).write_bytes(b"PK")
        raise problem

    return write


def full_disk(engine):
    return mock.patch.object(torch, "save", full(OSError(28, "No space left on device")))


def full_disk_by_torch(engine):
    return mock.patch.object(torch, "save", full(RuntimeError("unexpected pos 64 vs 0")))


def failing_copy(engine):
    problem = OSError(5, "Input/output error")
    return mock.patch("deepspeed.runtime.engine.copyfile", side_effect=problem)


def failing_flush(engine):
    return Failing("fsync", 1, for_good=False)


def a_disk_of_its_own(engine):
    """The other rank is on another node, and its file is not there."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.dict(os.environ, GROUP_RANK="1"))
    stack.enter_context(mock.patch.object(shared_folders, "_look", lambda *_: [1]))
    return stack


@contextlib.contextmanager
def a_failing_hook(engine):
    def fail(*_):
        raise KeyError("of one rank")

    hook = engine.module.register_state_dict_post_hook(fail)
    try:
        yield
    finally:
        hook.remove()


NO_ROOM = (
    "rank 1: OSError: {root}/.unfinished-{tag}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: ",
    "No space left on device",
)
SAVES = {
    "a full disk, a new tag": (1, full_disk, "y", NO_ROOM),
    "a full disk, the same tag": (1, full_disk, "x", NO_ROOM),
    "a full disk in torch's words": (1, full_disk_by_torch, "y", NO_ROOM),
    "a script that cannot be copied": (
        0,
        failing_copy,
        "y",
        ["rank 0: ", "Input/output error"],
    ),
    "a file that cannot be flushed": (1, failing_flush, "y", ["pp_rank_1_", "Input/output error"]),
    "a hook that raises": (1, a_failing_hook, "y", ["rank 1: ", "KeyError: 'of one rank'"]),
    "a folder of a node's own": (
        1,
        a_disk_of_its_own,
        "y",
        ["save_dir: got {root}, which rank 0 and rank 1 do not share, accepted: a folder that all"],
    ),
}


def failed_saves(rank, world, folder):
    """What goes wrong on one rank alone: what both ranks say, and what is wrong afterwards."""
    engine, found = build(CASES["zero-2"]), {}
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder, tag="x")
    before = snapshot(engine)
    files = [Path(folder, name) for name in ("x/manifest.json", "latest")]
    times = [path.stat().st_mtime_ns for path in files]
    for name, (at, problem, tag, lines) in SAVES.items():
        run(engine, rank, 1, 2)
        with problem(engine) if rank == at else contextlib.nullcontext():
            said = told(engine.save_checkpoint, folder, tag=tag)
        wrong = [] if str(said).startswith("CheckpointError: ") else [str(said)]
        for line in lines:
            text = line.format(root=folder, tag=tag)
            wrong += [] if text in str(said) else [f"{text!r} is not in {said}"]
        torch.distributed.barrier()
        left = [path for path in listed(folder) if not path.startswith(".unfinished-")]
        if left != ["latest", "x"] or times != [path.stat().st_mtime_ns for path in files]:
            wrong.append(f"the folder changed: {left}")
        engine.load_checkpoint(folder)
        found[name] = wrong + changes(before, snapshot(engine))
    assert engine.save_checkpoint(folder, tag="y") is True
    return found, listed(folder)


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return run_ranks(2, failed_saves, str(tmp_path_factory.mktemp("saves") / "save"))


@pytest.mark.parametrize("name", SAVES)
def test_save_checkpoint_that_fails_on_one_rank_raises_on_all_and_changes_nothing(saves, name):
    for found, left in saves:
        assert not found[name], "\n".join(found[name])
        assert left == ["latest", "x", "y"], "the next save"


class Killed(BaseException):
    pass


CALLS = ("rename", "replace", "fsync", "mkdir", "open", "torch.save", "scandir")
KILLS = [(tag, call) for tag in ("a", "b") for call in CALLS]
"""The tag, which is there (a) or new (b), and the call at which the save dies."""


def kill_in_turn(save_once, call):
    """Die at the first call of a save, then at the second, and so on, until a save ends."""
    nth, ended = 0, False
    while not ended:
        nth, calls = nth + 1, []
        owner, name = PLACES[call]
        original = getattr(owner, name)

        def die(*args, calls=calls, original=original, nth=nth, **kwargs):
            calls.append(args)
            if len(calls) == nth:
                raise Killed
            return original(*args, **kwargs)

        with mock.patch.object(owner, name, die):
            try:
                save_once()
                ended = True
            except Killed:
                pass
        yield nth, ended


def killed(rank, world, folder):
    engine = small({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    step(engine)
    engine.save_checkpoint(folder, tag="a")
    old, found = weights(engine), {}
    step(engine)
    new = weights(engine)
    shutil.copytree(folder, f"{folder}.old")
    for tag, call in KILLS:
        wrong, points = [], 0
        save_once = functools.partial(engine.save_checkpoint, folder, tag=tag)
        for nth, ended in kill_in_turn(save_once, call):
            points += not ended
            path, _ = engine.load_checkpoint(folder)
            got = weights(engine)
            if path is None or not any(all(map(torch.equal, got, one)) for one in (old, new)):
                wrong.append(f"{nth}: {path}")
            engine.save_checkpoint(folder, tag="c")
            if ".unfinished" in " ".join(listed(folder)):
                wrong.append(f"{nth}: left {listed(folder)}")
            shutil.rmtree(folder)
            shutil.copytree(f"{folder}.old", folder)
        found[tag, call] = wrong, points
    return found


def test_save_checkpoint_killed_anywhere_leaves_a_checkpoint_that_loads(tmp_path):
    (found,) = run_ranks(1, killed, str(tmp_path / "save"))
    assert [wrong for wrong, _ in found.values()] == [[]] * len(KILLS)
    assert sum(points for _, points in found.values()) >= 25
