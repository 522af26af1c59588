"""Which ranks share a folder: all of them, or with ``checkpoint.use_node_local_storage`` those of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ..ranks import attempt, gather, rank_and_world

__all__ = ["Team", "everyone", "team_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Ranks that write to one folder and read from it."""

    ranks: range
    rank: int
    """This one, among all."""

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank does for all of the team."""
        return self.rank == self.ranks[0]

    def share(self, things: list[T]) -> list[T]:
        """What of ``things``, the same list on all ranks of the team, is this rank's to do."""
        return things[self.rank - self.ranks[0] :: len(self.ranks)]

    def members(self, by_rank: list[T]) -> list[T]:
        """What the ranks of this team gave."""
        return [by_rank[rank] for rank in self.ranks]

    def ask_leader(self, function: Callable[[], T], error: type[Exception]) -> T:
        """What ``function`` returns on the team's first rank; collective over all ranks.

        Raises:
            error: on every rank, what it raised on any.
        """

        def ask() -> T | None:
            return function() if self.leads else None

        answers, problems = attempt(ask)  # type: ignore[arg-type]  # mypy cannot join T and None
        if problems:
            raise error("\n".join(dict.fromkeys(problems.values())))
        return cast(T, answers[self.ranks[0]])


def everyone() -> Team:
    """All ranks."""
    rank, world = rank_and_world()
    return Team(range(world), rank)


def team_of(engine: Any) -> Team:
    """Ranks that share a folder with this one; collective where nodes have folders of their own.

    Ranks of a node follow one another, and its first has ``LOCAL_RANK`` 0, as every launcher starts them.
    """
    if not engine.use_node_local_storage():
        return everyone()
    rank, world = rank_and_world()
    firsts = [r for r, local in enumerate(gather(engine.local_rank)) if local == 0] or [0]
    start = max((first for first in firsts if first <= rank), default=0)
    return Team(range(start, min((first for first in firsts if first > start), default=world)), rank)
