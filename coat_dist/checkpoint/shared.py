"""Folders that all nodes must have before them, or each node alone: found before anything is written or read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ranks import attempt, gather, rank_and_world, say_ranks
from .manifest import CheckpointError
from .team import Team, sharing

__all__ = ["KEY", "check_one_save", "check_shared", "check_there", "part_of", "say_part", "wrong_part"]

KEY = "checkpoint.use_node_local_storage"
_SET = '"checkpoint": {"use_node_local_storage": true} in the DeepSpeed configuration'


def check_shared(
    folder: Path, named: str, nodes: Sequence[Sequence[int]], node_local: bool, error: type[Exception]
) -> None:
    """Whether nodes share a folder to save into, or with ``node_local`` each has its own; collective.

    Args:
        folder: made already, by rank 0, or with ``node_local`` by the first rank of each node.
        named: the argument or option that it was given as.
        nodes: of :func:`coat_dist.checkpoint.team.nodes_of_ranks`.
        node_local: ``checkpoint.use_node_local_storage``.

    Raises:
        error: on every rank; names the folder, the hosts and what is accepted.
    """
    folders = sharing(folder, nodes)
    if not node_local and len(folders) > 1:
        others = [rank for ranks in folders[1:] for rank in ranks]
        raise error(
            f"{named}: got {folder}, which {say_ranks(folders[0])} and {say_ranks(others)} do not share, accepted: a "
            f"folder that all nodes share, or {_SET} for folders on the nodes' own disks"
        )
    if node_local and len(folders) < len(nodes):
        ranks = next(ranks for ranks in folders if ranks not in [list(node) for node in nodes])
        raise error(
            f"{KEY}: got true, but {named} {folder} is one folder of {say_ranks(ranks)}, accepted: false, or a folder "
            "on each node's own disk"
        )


def check_there(folder: Path, named: str, error: type[Exception]) -> None:
    """Whether every rank finds a folder that some have found; collective.

    Raises:
        error: on every rank; names the ranks that do not, with their hosts.
    """

    def look() -> bool:
        return folder.is_dir()

    found, problems = attempt(look)
    missing = [rank for rank, there in enumerate(found) if not there]
    if missing and len(missing) < len(found):
        why = f" ({next(iter(problems.values()))})" if problems else ""
        raise error(
            f"{named}: got {folder}, which is not there on {say_ranks(missing)}{why}, accepted: a folder that all "
            f"nodes share; of checkpoints on the nodes' own disks, {_SET}"
        )


def part_of(team: Team) -> dict[str, Any]:
    """What a manifest says of a checkpoint that is a part of one: whose, and of which save; collective.

    Nothing where it is whole.
    """
    if team.whole:
        return {}
    save = gather(secrets.token_hex(8))[0]
    return {"part": {"ranks": list(team.ranks), "world_size": rank_and_world()[1], "save": save}}


def check_one_save(folder: Path, manifest: Mapping[str, Any] | None, team: Team) -> None:
    """Whether all nodes' parts are of one save: where a tag was saved again, a kill leaves the new part on one node and
    the old one on another. Collective; parts of older code do not say.

    Raises:
        CheckpointError: on every rank; names the hosts.
    """
    if team.whole:
        return
    part = (manifest or {}).get("part")
    saves = gather(str(part.get("save")) if isinstance(part, Mapping) else str(None))
    others = [rank for rank, save in enumerate(saves) if save != saves[0]]
    if others:
        first = [rank for rank in range(len(saves)) if rank not in others]
        raise CheckpointError(
            f"{folder}: {say_ranks(first)} and {say_ranks(others)} hold parts of different saves of this tag, as a "
            "kill or an error leaves them while it is saved again; accepted: another tag, saved by all nodes together"
        )


def wrong_part(folder: Path, manifest: Mapping[str, Any], team: Team) -> str | None:
    """A line where a checkpoint is the part of other ranks than those that are about to load it."""
    part = manifest.get("part")
    if not isinstance(part, Mapping) or list(part.get("ranks", ())) == list(team.ranks):
        return None
    return (
        f"{folder}: holds the files of {say_part(part)}, saved with {KEY}, accepted here: those of "
        f"{say_part({'ranks': team.ranks, 'world_size': rank_and_world()[1]})} (start as many ranks, nodes in the "
        "order of the run that saved it)"
    )


def say_part(part: Mapping[str, Any]) -> str:
    """``ranks 0-7 of 16``, of what a manifest says under ``part``."""
    ranks, world = list(part["ranks"]), part["world_size"]
    numbers = f"{ranks[0]}-{ranks[-1]}" if ranks == list(range(ranks[0], ranks[-1] + 1)) else ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers if len(ranks) > 1 else ranks[0]} of {world}"
