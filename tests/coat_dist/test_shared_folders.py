"""Folders that nodes share or do not."""

import os
from pathlib import Path

import pytest

from coat_dist import shared_folders
from coat_dist.checkpoint.manifest import CheckpointError
from coat_dist.ranks import check_same_on_all_ranks, on_first_ranks, say_ranks
from tests.support import run_ranks


def on_a_node(rank, folder):
    """As if each rank were alone on its node, whose own disk is where it works."""
    os.environ.update(LOCAL_RANK="0", COAT_HOST=f"node-{'ab'[rank]}", GROUP_RANK=str(rank))
    own = Path(folder, f"node-{rank}")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    shared_folders.PATIENCE = 0.2


def error_of(function, *args):
    with pytest.raises(ValueError) as raised:
        function(*args)
    return str(raised.value)


def folders(rank, world, folder):
    on_a_node(rank, folder)
    check_same_on_all_ranks({})
    Path("own").mkdir()
    Path(f"own/{rank}").mkdir()
    found = {
        name: shared_folders.sharing(Path(path))
        for name, path in (("shared", folder), ("own", "own"), ("missing", "nowhere"))
    }
    errors = [error_of(shared_folders.check_there, Path("own/0"), "--load", CheckpointError)]
    calls = []
    answers = [
        on_first_ranks(ranks, lambda: calls.append(1) or f"made by {rank}")
        for ranks in (found["shared"], found["own"])
    ]

    def fail():
        if rank:
            raise CheckpointError("no room")

    errors.append(error_of(on_first_ranks, found["own"], fail))
    left = sorted(os.listdir("own"))
    return found, errors, answers, len(calls), left, say_ranks([0, 1]), say_ranks([1])


def test_sharing_on_two_nodes(tmp_path):
    for rank, (found, errors, answers, calls, left, both, second) in enumerate(
        run_ranks(2, folders, str(tmp_path))
    ):
        assert found == {"shared": [[0, 1]], "own": [[0], [1]], "missing": [[0], [1]]}
        missing, failed = errors
        assert (
            "--load: got own/0, which is not there on rank 1 (host node-b), accepted: a folder "
            "that all" in missing
        )
        assert failed == "no room (host node-b)"
        assert answers == ["made by 0", f"made by {rank}"] and calls == (1 if rank else 2)
        assert left == [str(rank)]
        assert both == "ranks 0-1 (hosts node-a, node-b)" and second == "rank 1 (host node-b)"
