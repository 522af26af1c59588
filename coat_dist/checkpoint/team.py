"""Ranks that share a folder of checkpoints, and one answer on all ranks: errors, agreement, whose
folder it is.

The ranks are all of them, or with ``checkpoint.use_node_local_storage`` those of one node.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ..nodes import by_node, my_place, on_host, say_host
from ..ranks import attempt, gather, rank_and_world, say_ranks

__all__ = [
    "KEY",
    "CheckpointError",
    "Team",
    "check_part",
    "check_shared",
    "check_there",
    "everyone",
    "nodes_of_ranks",
    "part_of",
    "say_part",
    "sharing",
    "team_of",
]

T = TypeVar("T")

KEY = "checkpoint.use_node_local_storage"
PATIENCE = 3.0
"""Seconds that a file of another host has to appear: network file systems cache names for a
moment.
"""
_SET = '"checkpoint": {"use_node_local_storage": true} in the DeepSpeed configuration'


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message names it and the reason."""


@dataclass(frozen=True)
class Team:
    """Ranks that write to one folder and read from it. Methods that raise are collective over
    all ranks.
    """

    ranks: Sequence[int]  # in ascending order
    rank: int  # this one, among all

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank does for the team."""
        return self.rank == self.ranks[0]

    @property
    def whole(self) -> bool:
        """Whether it has all ranks."""
        return len(self.ranks) == rank_and_world()[1]

    def share(self, things: list[T]) -> list[T]:
        """This rank's share of ``things``, the same list on all ranks of the team."""
        return things[self.ranks.index(self.rank) :: len(self.ranks)]

    def members(self, by_rank: list[T]) -> list[T]:
        """The entries of the ranks of this team."""
        return [by_rank[rank] for rank in self.ranks]

    def each(self, work: Callable[[], T], doing: str = "") -> list[T]:
        """Results of ``work``, which must not use collectives, by rank among all.

        Raises:
            CheckpointError: on every rank, if any rank's part raises; with ``doing``, its first
                words, it names ranks.
        """
        results, errors = attempt(work)
        if errors and doing:
            lines = "; ".join(
                f"rank {rank}{say_host(rank)}: {text}" for rank, text in errors.items()
            )
            raise CheckpointError(f"{doing}: {lines}")
        _raise([text if self.whole else on_host(text, rank) for rank, text in errors.items()])
        return cast(list[T], results)

    def ask_leader(self, work: Callable[[], T], doing: str = "") -> T:
        """:meth:`each`, where only the team's first rank works; its result on all of the team's
        ranks.
        """
        return cast(T, self.each(lambda: work() if self.leads else None, doing)[self.ranks[0]])

    def agree(self, arguments: Callable[[], Mapping[str, Any]]) -> None:
        """Refuse arguments that differ between ranks; a "folder" may differ between nodes with
        folders of their own.
        """
        by_rank, wrong = self.each(arguments), []
        for key in by_rank[0]:
            given: dict[Any, list[int]] = {}
            for rank, one in enumerate(by_rank):
                given.setdefault(one[key], []).append(rank)
            if len(given) > 1 and (self.whole or key != "folder"):
                lines = "; ".join(
                    f"{value!r} on {say_ranks(ranks)}" for value, ranks in given.items()
                )
                wrong.append(f"{key}: got {lines}, accepted: the same on all ranks")
        _raise(wrong)

    def refuse(self, problems: list[str], heading: str) -> None:
        """Raise the problems of any rank on all ranks, a line each, below a heading."""
        by_rank = gather([text if self.whole else on_host(text, self.rank) for text in problems])
        _raise([line for lines in by_rank for line in lines], heading)


def _raise(lines: list[str], *heading: str) -> None:
    if lines:
        raise CheckpointError("\n".join([*heading, *dict.fromkeys(lines)]))


def everyone() -> Team:
    """All ranks."""
    rank, world = rank_and_world()
    return Team(range(world), rank)


def nodes_of_ranks(local: int | None = None) -> list[list[int]]:
    """Ranks of each node; collective. ``local``: this rank's number on its node; None = what the
    launcher says.
    """
    return by_node(gather(my_place(local)))


def team_of(engine: Any) -> Team:
    """Ranks that share checkpoints with this one; collective where nodes have folders of their
    own.
    """
    team = everyone()
    if not engine.use_node_local_storage():
        return team
    return Team(
        next(ranks for ranks in nodes_of_ranks(engine.local_rank) if team.rank in ranks), team.rank
    )


def sharing(folder: Path, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranks by the folder that they find under a path, which may be missing, in the order of first
    ranks; collective.

    The first rank of each of the ``nodes`` puts a file there, looks for those of the others, and
    removes it.
    """
    rank, world = rank_and_world()
    if len(nodes) == 1:
        return [list(range(world))]
    firsts = [ranks[0] for ranks in nodes]
    mine = folder / f".unfinished-shared-{os.getpid()}-{secrets.token_hex(8)}"
    if rank in firsts:
        with suppress(OSError):
            mine.touch(exist_ok=False)
    names = gather(mine.name)
    found = gather(
        _look(folder, {first: names[first] for first in firsts}) if rank in firsts else []
    )
    if rank in firsts:
        with suppress(OSError):
            mine.unlink()
    folders: dict[int, list[int]] = {}
    for ranks in nodes:
        folders.setdefault(min([ranks[0], *found[ranks[0]]]), []).extend(ranks)
    return [sorted(ranks) for ranks in folders.values()]


def _look(folder: Path, names: dict[int, str]) -> list[int]:
    """Whose files are there, at the latest after :data:`PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while True:
        there: set[str] = set()
        with suppress(OSError):
            # Asks the file server; a lookup of the name alone may not.
            there = set(os.listdir(folder))
        found = [first for first, name in names.items() if name in there]
        if len(found) == len(names) or time.monotonic() > end:
            return found
        time.sleep(0.1)


def check_shared(
    folder: Path,
    option: str,
    nodes: Sequence[Sequence[int]],
    node_local: bool,
    error: type[Exception],
) -> None:
    """Raise on every rank if nodes do not share a folder to save into, or with ``node_local`` do;
    collective.

    Args:
        folder: made already, by rank 0, or with ``node_local`` by the first rank of each node.
        option: the argument or option that it was given as.
        nodes: of :func:`nodes_of_ranks`.
        node_local: ``checkpoint.use_node_local_storage``.
        error: names the folder, the hosts and what is accepted.
    """
    folders = sharing(folder, nodes)
    if not node_local and len(folders) > 1:
        others = [rank for ranks in folders[1:] for rank in ranks]
        raise error(
            f"{option}: got {folder}, which {say_ranks(folders[0])} and {say_ranks(others)} do not "
            "share, accepted: a "
            f"folder that all nodes share, or {_SET} for folders on the nodes' own disks"
        )
    if node_local and len(folders) < len(nodes):
        ranks = next(ranks for ranks in folders if ranks not in [list(node) for node in nodes])
        raise error(
            f"{KEY}: got true, but {option} {folder} is one folder of {say_ranks(ranks)}, "
            "accepted: false, or a folder "
            "on each node's own disk"
        )


def check_there(folder: Path, option: str, error: type[Exception]) -> None:
    """Raise on every rank if only some find a folder, and name those that do not; collective."""
    found = gather(os.path.isdir(folder))
    missing = [rank for rank, there in enumerate(found) if not there]
    if missing and len(missing) < len(found):
        raise error(
            f"{option}: got {folder}, which is not there on {say_ranks(missing)}, accepted: a "
            "folder that all nodes "
            f"share; of checkpoints on the nodes' own disks, {_SET}"
        )


def part_of(team: Team) -> dict[str, Any]:
    """Whose files a node's part of a checkpoint has, for its manifest."""
    return {"ranks": list(team.ranks), "world_size": rank_and_world()[1]}


def check_part(folder: Path, manifest: Mapping[str, Any], team: Team) -> None:
    """Refuse a part of a checkpoint that other ranks wrote, and parts of two saves of one tag;
    collective.

    Where a tag was saved again, a kill leaves the new part on one node and the old one on another.

    Raises:
        CheckpointError: on every rank; names the hosts.
    """
    part, own, wrong = manifest.get("part"), part_of(team), []
    if part and part != own:
        wrong = [
            f"{folder}: holds the files of {say_part(part)}, accepted here: those of "
            f"{say_part(own)}"
        ]
    team.refuse(wrong, f"{KEY}: got parts of other nodes:")
    saved = gather(manifest.get("saved"))
    others = [rank for rank, at in enumerate(saved) if at != saved[0]]
    if others and not team.whole:
        first = [rank for rank in range(len(saved)) if rank not in others]
        raise CheckpointError(
            f"{folder}: got parts of different saves on {say_ranks(first)} and "
            f"{say_ranks(others)}, accepted: another "
            "tag, saved by all nodes together"
        )


def say_part(part: Mapping[str, Any]) -> str:
    """``ranks 0-7 of 16``, from a manifest's "part"."""
    return f"{say_ranks(list(part['ranks']))} of {part['world_size']}"
