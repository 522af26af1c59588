"""``engine.save_checkpoint`` and ``load_checkpoint`` of coat engines: whole or not there,
verified, errors on all.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.coat_dist.checkpoint.test_loading import build, on_rank_0
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


def told(function, *args, **kwargs):
    """The error's type and text, or what the call returned."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path):
    other = next(p for p in path.parent.glob("*optim_states.pt") if p != path)
    names = path.rename(path.with_name("x")), other.rename(path)
    names[0].rename(other)


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 7),
    "flipped": flip,
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}
LATEST = {
    "empty": b"",
    "nothing": b"global_step99",
    "binary": b"\xff\x00\xfe",
    "elsewhere": b"../b",
    "unfinished": b".unfinished-b",
    "two lines": b"a\nb",
}


def damaged(rank, world, folder, case):
    """Each file damaged in turn, in each way; what loading says, what it changes, and that the
    whole one loads.
    """
    engine = build(CASES[case])
    run(engine, rank, 0, 1)
    root = Path(folder)
    assert engine.save_checkpoint(folder, "a", {"mine": 1}) is True
    run(engine, rank, 1, 2)
    saved = snapshot(engine)
    assert engine.save_checkpoint(str(root), "b", client_state={"mine": 2}) is True
    run(engine, rank, 2, 3)
    now, wrong = snapshot(engine), []
    on_rank_0(rank, lambda: shutil.copytree(root, f"{root}.whole"))

    def expect(name, text, **arguments):
        said = told(engine.load_checkpoint, folder, **arguments)
        if not (isinstance(said, str) and said.startswith("CheckpointError: ") and text in said):
            wrong.append(f"{name}: {text!r} not in {said}")
        wrong.extend(f"{name}: {line}" for line in changes(now, snapshot(engine)))

        def restore():
            shutil.rmtree(root)
            shutil.copytree(f"{root}.whole", root)

        on_rank_0(rank, restore)

    files = sorted(p.name for p in (root / "b").iterdir())
    ways = list(DAMAGE)
    torch.distributed.barrier()
    for i, name in enumerate(files):
        for way in ways if name.endswith("optim_states.pt") and i < 1 else [ways[i % len(ways)]]:
            on_rank_0(rank, lambda name=name, way=way: DAMAGE[way](root / "b" / name))
            if (name, way) == ("manifest.json", "missing"):
                continue
            expect(f"{name} {way}", f"{root}/b/{name}")
    last = next(n for n in files if n.endswith("optim_states.pt"))
    on_rank_0(rank, lambda: swap(root / "b" / last))
    expect("swapped", f"{root}/b/{last}: damaged")
    on_rank_0(rank, lambda: shutil.copy(root / "a" / last, root / "b" / last))
    expect("of another checkpoint", f"{root}/b/{last}: damaged")
    on_rank_0(
        rank, lambda: shutil.copy(root / "a" / last, root / "b" / last.replace("rank_0", "rank_7"))
    )
    expect("foreign", "is of another checkpoint")
    for name, content in LATEST.items():
        on_rank_0(rank, lambda content=content: (root / "latest").write_bytes(content))
        expect(f"latest {name}", f"{root}/latest: ")
    on_rank_0(rank, lambda: DAMAGE["a folder"](root / "latest"))
    expect("latest a folder", f"{root}/latest: ")
    on_rank_0(rank, lambda: (root / "b").rename(root / ".unfinished-b"))
    expect("unfinished", "tag: got '.unfinished-b'", tag=".unfinished-b")
    expect("not there", "tag: got 'c'", tag="c")
    expect("other tags", "tag: got ", tag=["a", "b"][rank])
    if case == "zero-3":
        said = told(engine.load_checkpoint, folder, tag="a", load_optimizer_states=False)
        text = (
            "ValueError: load_optimizer_states: got False with tag 'a' and "
            "zero_optimization.stage 3"
        )
        wrong.extend(
            []
            if str(said).startswith(f"{text}, where DeepSpeed reads what {root}/latest ")
            else [said]
        )
        wrong.extend(changes(now, snapshot(engine)))
    on_rank_0(rank, (root / "latest").unlink)
    path, state = engine.load_checkpoint(folder)
    wrong.extend(f"loaded: {line}" for line in changes(saved, snapshot(engine)))
    if state.get("mine") != 2 or not path.startswith(f"{root}/b/"):
        wrong.append(f"loaded {path}, {state.keys()}")
    if engine.load_checkpoint(f"{folder}-nowhere") != (None, None):
        wrong.append("a folder that is not there")
    return wrong


# Stages 1 and 2 write the same files.
@pytest.mark.parametrize(
    "case", ["zero-1", pytest.param("zero-2", marks=pytest.mark.slow), "zero-3"]
)
def test_nothing_damaged_is_loaded(tmp_path, case):
    assert run_ranks(2, damaged, str(tmp_path / "save"), case) == [[], []]
