"""Which ranks share a folder: all of them, or with ``checkpoint.use_node_local_storage`` those of one node.

And whether they do: :func:`sharing` tries it out.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ..nodes import by_node, my_place, on_host
from ..ranks import attempt, gather, rank_and_world

__all__ = ["Team", "everyone", "nodes_of_ranks", "sharing", "team_of", "team_of_node"]

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds that a file of another host has to appear: network file systems keep what they have seen for a moment."""


@dataclass(frozen=True)
class Team:
    """Ranks that write to one folder and read from it."""

    ranks: Sequence[int]
    """In ascending order."""
    rank: int
    """This one, among all."""

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank does for all of the team."""
        return self.rank == self.ranks[0]

    @property
    def whole(self) -> bool:
        """Whether it has all ranks."""
        return len(self.ranks) == rank_and_world()[1]

    def share(self, things: list[T]) -> list[T]:
        """What of ``things``, the same list on all ranks of the team, is this rank's to do."""
        return things[self.ranks.index(self.rank) :: len(self.ranks)]

    def members(self, by_rank: list[T]) -> list[T]:
        """What the ranks of this team gave."""
        return [by_rank[rank] for rank in self.ranks]

    def say(self, text: str) -> str:
        """``text`` about this team's folder, with the host where nodes have folders of their own."""
        return text if self.whole else on_host(text, self.rank)

    def ask_leader(self, function: Callable[[], T], error: type[Exception]) -> T:
        """What ``function`` returns on the team's first rank; collective over all ranks.

        Raises:
            error: on every rank, what it raised on any.
        """

        def ask() -> T | None:
            return function() if self.leads else None

        answers, problems = attempt(ask)  # type: ignore[arg-type]  # mypy cannot join T and None
        if problems:
            told = (text if self.whole else on_host(text, rank) for rank, text in problems.items())
            raise error("\n".join(dict.fromkeys(told)))
        return cast(T, answers[self.ranks[0]])


def everyone() -> Team:
    """All ranks."""
    rank, world = rank_and_world()
    return Team(range(world), rank)


def nodes_of_ranks(local: int | None = None) -> list[list[int]]:
    """Ranks of each node; collective.

    Args:
        local: this rank's number on its node; None = what the launcher says.
    """
    return by_node(gather(my_place(local)))


def team_of_node(local: int | None = None) -> Team:
    """Ranks of this rank's node; collective. Arguments as of :func:`nodes_of_ranks`."""
    rank = rank_and_world()[0]
    return Team(next(ranks for ranks in nodes_of_ranks(local) if rank in ranks), rank)


def team_of(engine: Any) -> Team:
    """Ranks that share checkpoints with this one; collective where nodes have folders of their own."""
    return team_of_node(engine.local_rank) if engine.use_node_local_storage() else everyone()


def sharing(folder: Path, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranks by the folder that they find under this path, which may differ between ranks; collective.

    The first rank of each node puts a file there, looks for those of the others, and removes it. One that cannot is
    told apart by what it sees. With one node nothing is tried.

    Args:
        folder: may be missing.
        nodes: of :func:`nodes_of_ranks`; ranks of a node share their folders.

    Returns:
        The ranks of each folder; they begin with their first rank, and stand in its order.
    """
    rank, world = rank_and_world()
    if len(nodes) == 1:
        return [list(range(world))]
    firsts = [ranks[0] for ranks in nodes]
    name = folder / f".unfinished-shared-{os.getpid()}-{secrets.token_hex(8)}"
    written = rank in firsts and _put(name)
    names = gather(name.name if written else None)
    seen = None
    if rank in firsts:
        others = {first: names[first] for first in firsts if names[first] is not None}
        seen = _look(folder, {first: cast(str, other) for first, other in others.items()})
    found = gather(seen)
    if written:
        with suppress(OSError):
            name.unlink()
    folders: dict[int, list[int]] = {}
    for ranks in nodes:
        folders.setdefault(min([ranks[0], *(found[ranks[0]] or ())]), []).extend(ranks)
    return [sorted(ranks) for ranks in folders.values()]


def _put(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except OSError:
        return False
    return True


def _look(folder: Path, names: dict[int, str]) -> list[int]:
    """Whose files are there, at the latest after :data:`PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            there = set(os.listdir(folder))  # asks the file server; a lookup of the name alone may not
        except OSError:
            there = set()
        found = [first for first, name in names.items() if name in there]
        if len(found) == len(names) or time.monotonic() > end:
            return found
        time.sleep(0.1)
