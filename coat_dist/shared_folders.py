"""Which nodes find one folder under a path: each may have a disk of its own there."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from .nodes import by_node, my_place
from .ranks import gather, rank_and_world, say_ranks

PATIENCE = 3.0
"""Seconds that a file of another host has to appear: network file systems cache names for a
moment.
"""


def sharing(folder: Path) -> list[list[int]]:
    """Ranks by the folder that they find under a path, which may be missing, in the order of first
    ranks; collective.

    The first rank of each node puts a file there, looks for those of the others, and
    removes it.
    """
    rank, world = rank_and_world()
    nodes = by_node(gather(my_place()))
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


def check_shared(folder: Path, option: str, error: type[Exception]) -> None:
    """Raise on every rank if nodes find different folders under a path; collective."""
    shared = sharing(folder)
    if len(shared) > 1:
        who = " and ".join(say_ranks(ranks) for ranks in shared)
        raise error(
            f"{option}: got {folder}, which {who} do not share, accepted: a folder that all nodes "
            "share"
        )


def check_there(folder: Path, option: str, error: type[Exception]) -> None:
    """Raise on every rank if only some find a folder, and name those that do not; collective."""
    found = gather(os.path.isdir(folder))
    missing = [rank for rank, there in enumerate(found) if not there]
    if missing and len(missing) < len(found):
        raise error(
            f"{option}: got {folder}, which is not there on {say_ranks(missing)}, accepted: a "
            "folder that all nodes share"
        )
