"""Folders that programs write to: whether they lie in a checkpoint, and whether there is room."""

from __future__ import annotations

import shutil
from pathlib import Path

from coat_dist.checkpoint.read.tags import is_checkpoint

__all__ = ["checkpoint_at", "lack_of_room", "room"]


def checkpoint_at(folder: Path) -> Path | None:
    """The checkpoint that a folder is or lies in; None where there is none. Its run may remove it,
    with all in it.

    Args:
        folder: need not exist; absolute, and without links, which would hide what it lies in.
    """
    return next(filter(is_checkpoint, (folder, *folder.parents)), None)


def room(folder: Path) -> int:
    """Bytes that are free where a folder is or will be."""
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def lack_of_room(folder: Path, needed: int) -> str | None:
    """What an error says of a folder that ``needed`` bytes do not fit into; None where they do,
    or nobody knows.
    """
    try:
        free = room(folder)
    except OSError:  # what is wrong with the folder is said where it is made
        return None
    return f"where {free:,} bytes are free and {needed:,} are needed" if free < needed else None
