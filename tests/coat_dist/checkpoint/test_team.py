"""Ranks of a node, folders that nodes share or do not, checkpoints that are a node's part."""

import os
import shutil
from pathlib import Path

import pytest

from coat_dist.checkpoint import team
from coat_dist.checkpoint.team import CheckpointError, check_shared, check_there
from coat_dist.nodes import Place, by_node
from coat_dist.ranks import check_same_on_all_ranks, on_first_ranks, say_ranks
from tests.coat_dist.checkpoint.test_loading import build, refused
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


@pytest.mark.parametrize(
    "places, found",
    [
        ([("a", None, 0), ("a", None, 1), ("b", None, 0)], [[0, 1], [2]]),
        # srun --distribution=cyclic: ranks of a node do not follow one another.
        ([("a", "0", 0), ("b", "1", 0), ("a", "0", 1), ("b", "1", 1)], [[0, 2], [1, 3]]),
        # Two launchers on one host, or containers of one name.
        ([("a", None, 0), ("a", None, 1), ("a", None, 0), ("a", None, 1)], [[0, 1], [2, 3]]),
        ([("a", "0", 0), ("a", "1", 0), ("a", "1", 1)], [[0], [1, 2]]),
    ],
)
def test_ranks_of_each_node(places, found):
    assert by_node([Place(*place) for place in places]) == found


def on_a_node(rank, folder):
    """As if each rank were alone on its node, whose own disk is where it works."""
    os.environ.update(LOCAL_RANK="0", COAT_HOST=f"node-{'ab'[rank]}", GROUP_RANK=str(rank))
    own = Path(folder, f"node-{rank}")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    team.PATIENCE = 0.2


def error_of(function, *args):
    with pytest.raises(ValueError) as raised:
        function(*args)
    return str(raised.value)


def folders(rank, world, folder):
    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    both = team.nodes_of_ranks()
    Path("own").mkdir()
    found = {
        "shared": team.sharing(Path(folder), both),
        "own": team.sharing(Path("own"), both),
        "missing": team.sharing(Path("nowhere"), both),
    }
    check_shared(Path(folder), "--save", both, False, CheckpointError)
    check_shared(Path("own"), "--save", both, True, CheckpointError)
    Path(f"own/{rank}").mkdir()
    errors = [
        error_of(check_shared, Path("own"), "--save", both, False, CheckpointError),
        error_of(check_shared, Path(folder), "--save", both, True, CheckpointError),
        error_of(check_there, Path("own/0"), "--load", CheckpointError),
    ]
    calls = []
    answers = [
        on_first_ranks(ranks, lambda: calls.append(1) or f"made by {rank}")
        for ranks in (found["shared"], found["own"])
    ]

    def fail():
        if rank:
            raise CheckpointError("no room")

    errors.append(error_of(on_first_ranks, found["own"], fail))
    return (
        found,
        errors,
        answers,
        len(calls),
        sorted(os.listdir("own")),
        say_ranks([0, 1]),
        say_ranks([1]),
    )


def test_folders_of_two_nodes(tmp_path):
    for rank, (found, errors, answers, calls, left, both, second) in enumerate(
        run_ranks(2, folders, str(tmp_path))
    ):
        assert found == {"shared": [[0, 1]], "own": [[0], [1]], "missing": [[0], [1]]}
        apart, one, missing, failed = errors
        assert (
            "--save: got own, which rank 0 (host node-a) and rank 1 (host node-b) do not share, "
            "accepted: " in apart
        )
        assert (
            f"got true, but --save {tmp_path} is one folder of ranks 0-1 (hosts node-a, node-b), "
            "accepted: f" in one
        )
        assert (
            "--load: got own/0, which is not there on rank 1 (host node-b), accepted: a folder "
            "that all" in missing
        )
        assert failed == "host node-b: no room"
        assert answers == ["made by 0", f"made by {rank}"] and calls == (1 if rank else 2)
        assert left == [str(rank)] and (both, second) == (
            "ranks 0-1 (hosts node-a, node-b)",
            "rank 1 (host node-b)",
        )


def parts(rank, world, folder, case):
    on_a_node(rank, folder)
    own = {"checkpoint": {"use_node_local_storage": True}}
    engine = build(CASES[case], **own)
    run(engine, rank, 0, 1)
    shared = error_of(engine.save_checkpoint, folder)
    engine.save_checkpoint("disk", tag="x")
    path, _ = engine.load_checkpoint("disk", tag="x")
    Path("disk", "x").rename(Path("disk", "y"))
    one = refused(engine, load_dir="disk", tag="x")
    if rank == 0:  # as if nodes had changed places
        Path(folder, "node-1", "disk", "y").rename(Path(folder, "node-0", "disk", "x"))
        Path("disk", "y").rename(Path(folder, "node-1", "disk", "x"))
    team.nodes_of_ranks()  # a barrier
    swapped = refused(engine, load_dir="disk", tag="x")
    plain = build(CASES[case])
    lost = error_of(plain.save_checkpoint, "disk")
    return path is not None, shared, one, swapped, lost


@pytest.mark.parametrize("case", ["zero-2", pytest.param("zero-3", marks=pytest.mark.slow)])
def test_each_node_has_its_part(case, tmp_path):
    for loaded, shared, missing, swapped, lost in run_ranks(2, parts, str(tmp_path), case):
        assert loaded
        assert (
            f"use_node_local_storage: got true, but save_dir {tmp_path} is one folder of ranks 0-1"
            in shared
        )
        assert "host node-a: tag: got 'x', which is no checkpoint in disk" in missing
        assert (
            "host node-a: disk/x: holds the files of rank 1 (host node-b) of 2, accepted here: "
            "those of" in swapped
        )
        assert "host node-b: disk/x: holds the " in swapped
        assert "1' on rank 1 (host node-b), accepted: the same on all ranks" in lost.replace(
            "/disk", ""
        ), lost


def saved_again(rank, world, folder):
    """A tag that is saved a second time; node b is killed before its part has the new name, or
    between both names.
    """
    on_a_node(rank, folder)
    engine = build(CASES["zero-2"], checkpoint={"use_node_local_storage": True})
    run(engine, rank, 0, 1)
    engine.save_checkpoint("disk", tag="x")
    first, replaced = snapshot(engine), Path("disk", ".unfinished-replaced-x")
    shutil.copytree("disk/x", "old")
    if rank:
        Path("disk", "x").rename(replaced)
    team.nodes_of_ranks()  # a barrier
    run(engine, rank, 1, 2)
    path, _ = engine.load_checkpoint("disk")  # one save, under two names
    wrong = changes(first, snapshot(engine))
    run(engine, rank, 1, 2)
    engine.save_checkpoint("disk", tag="x")
    now = snapshot(engine)
    if rank:
        shutil.rmtree("disk/x")
        shutil.copytree("old", "disk/x")
    team.nodes_of_ranks()
    mixed = [refused(engine, load_dir="disk", tag=tag) for tag in (None, "x")]
    if rank:
        Path("disk", "x").rename(replaced)
    team.nodes_of_ranks()
    mixed.append(refused(engine, load_dir="disk"))
    return path, wrong + changes(now, snapshot(engine)), mixed


def test_parts_of_two_saves_are_not_mixed(tmp_path):
    for rank, (path, wrong, mixed) in enumerate(run_ranks(2, saved_again, str(tmp_path))):
        assert (
            path == f"disk/{'.unfinished-replaced-x' if rank else 'x'}/mp_rank_00_model_states.pt"
        )
        assert wrong == []
        for text in mixed:
            assert (
                "rank 0 (host node-a) and rank 1 (host node-b)" in text
                and "got parts of different saves" in text
            )
