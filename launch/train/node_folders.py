"""The folders of a run on several nodes: shared by all of them, or checkpoints on each node's own disk.

With ``checkpoint.use_node_local_storage`` each node holds the files of its own ranks in ``--save``, and the first rank
of each node looks at that folder and locks it. Everything else that a run writes is rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest
from coat_dist.checkpoint.team import KEY, Team, check_shared, check_there, everyone, nodes_of_ranks, sharing
from coat_dist.checkpoint.write.durable import make_folder
from coat_dist.checkpoint.write.publish import own_name, published, replaced_or
from coat_dist.config import look_up
from coat_dist.nodes import on_host, say_host
from coat_dist.ranks import attempt, on_rank_0, rank_and_world
from launch.prep import DataError
from launch.train.arguments import TrainingOptions
from launch.train.folders import Folders, open_folders

__all__ = ["check_export", "node_local", "open_on_nodes", "sharers", "team_of_checkpoints"]


def node_local(settings: Any) -> bool:
    """Whether nodes keep checkpoints on disks of their own."""
    return look_up(settings, KEY) is True


def team_of_checkpoints(settings: Any) -> Team:
    """Ranks that have the same folder of checkpoints before them; collective where nodes have their own."""
    return _own(nodes_of_ranks()) if node_local(settings) else everyone()


def open_on_nodes(args: TrainingOptions, settings: Any, locks: ExitStack) -> Folders:
    """What :func:`launch.train.folders.open_folders` finds, on every rank; collective.

    Raises:
        CoatConfigError, CheckpointError: on every rank, what it raises on one; nodes that do not share ``--save`` or
            ``--load``, or with ``use_node_local_storage`` do; nodes that have no step in common.
    """
    nodes, local = nodes_of_ranks(), node_local(settings)
    if len(nodes) == 1:
        return on_rank_0(lambda: open_folders(args, locks))
    if local:
        if args.save is not None:  # before two nodes would lock one folder
            _make(Path(args.save), "--save")
            check_shared(Path(args.save), "--save", nodes, local, CoatConfigError)
        return _open_on_each(args, locks, nodes)
    folders = on_rank_0(lambda: open_folders(args, locks))
    if args.save is not None:
        check_shared(Path(args.save), "--save", nodes, local, CoatConfigError)
    if folders.source is not None:
        check_there(folders.source, "--load", CoatConfigError)
    return folders


def sharers(folder: Path, option: str) -> list[list[int]]:
    """Ranks by the folder that they find under this path, a cache, which is made on nodes where it is missing.

    Collective.

    Raises:
        DataError: on every rank; it cannot be made on some node.
    """
    nodes = nodes_of_ranks()
    if len(nodes) > 1:
        _make(folder, option)
    return sharing(folder, nodes)


def _make(folder: Path, option: str) -> None:
    _, problems = attempt(lambda: make_folder(folder))
    if problems:
        rank, why = next(iter(problems.items()))
        raise DataError(f"{option}: {folder} cannot be written ({on_host(why, rank)})")


def check_export(option: str, settings: Any) -> None:
    """Refuse to make something of the last checkpoint where no node has all of it; collective.

    Raises:
        CoatConfigError: names key and option.
    """
    if node_local(settings) and len(nodes_of_ranks()) > 1:
        raise CoatConfigError(
            f"{KEY}: got true with {option}, which needs the files of all nodes, accepted: false and a --save that all "
            "nodes share, or --no-export"
        )


def _own(nodes: Sequence[Sequence[int]]) -> Team:
    rank = rank_and_world()[0]
    return Team(next(ranks for ranks in nodes if rank in ranks), rank)


def _open_on_each(args: TrainingOptions, locks: ExitStack, nodes: Sequence[Sequence[int]]) -> Folders:
    team = _own(nodes)

    def open_own() -> tuple[Folders, dict[str, int]]:
        if not team.leads:
            return Folders(None), {}
        own = copy(args)
        if team.rank:  # what is written beside checkpoints is rank 0's
            own.output = own.tensorboard = None
        found = open_folders(own, locks)
        there = [] if found.source is None else [*published(found.source.parent), found.source]
        return found, _steps(there)

    answers, problems = attempt(open_own)
    if problems:
        raise CoatConfigError("\n".join(dict.fromkeys(on_host(text, rank) for rank, text in problems.items())))
    found = {ranks[0]: one for ranks in nodes if (one := answers[ranks[0]]) is not None}
    name = _common(args, {rank: (folders.source, steps) for rank, (folders, steps) in found.items()})
    mine = found[team.ranks[0]][0]
    return mine if mine.source is None or name is None else replace(mine, source=replaced_or(mine.source.parent / name))


def _steps(checkpoints: Sequence[Path]) -> dict[str, int]:
    """By name. A damaged one is none that nodes could have in common; if it is what is loaded, loading says so."""
    found = {}
    for path in checkpoints:
        with suppress(CheckpointError):
            found[own_name(path)] = read_manifest(path)["progress"]["step"]
    return found


def _common(args: TrainingOptions, found: dict[int, tuple[Path | None, dict[str, int]]]) -> str | None:
    """The name of the checkpoint that all nodes continue from, of what each node's first rank found.

    A kill between the ``latest`` of one node and that of another leaves two names; of those, the checkpoint of the
    highest step that every node has.
    """
    names = {rank: None if source is None else own_name(source) for rank, (source, _) in found.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    steps = {name: at for _, all_steps in found.values() for name, at in all_steps.items()}
    everywhere = set.intersection(*(set(all_steps) for _, all_steps in found.values()))
    common = everywhere & set(names.values())
    if common:
        return max(common, key=lambda name: steps[name])
    said = ", ".join(f"{name or 'none'} on rank {rank}{say_host(rank)}" for rank, name in names.items())
    raise CheckpointError(
        f"--load: got {args.load}, whose newest checkpoints are {said}, accepted: folders that have a step in common, "
        "each with its node's part (--load DIR/STEP names one)"
    )
