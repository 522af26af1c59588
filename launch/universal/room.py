"""How many bytes a universal checkpoint takes, and what is said where they do not fit."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

from launch.outputs import room
from launch.weights.source import CARRIED

__all__ = ["bytes_needed", "say_full"]

_FULL = (*(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)), "unexpected pos")
"""What errors say where the disk is full; the last is all that is left of it where torch.save opens a file itself."""


def bytes_needed(source: Path) -> int:
    """Bytes of the trained parameters' tensors and of the files that travel along: the conversion takes a little more.

    0 where it cannot be known: what is wrong with the checkpoint is said when it is converted.
    """
    # Late: it brings the optimizer, for which `--help` does not wait.
    from coat_dist.checkpoint.universal.zero_checkpoint import ZeroCheckpoint
    from coat_dist.checkpoint.universal.zero_files import KEYS

    try:
        checkpoint = ZeroCheckpoint(source)
        needed = sum(len(KEYS) * 4 * math.prod(checkpoint.shape(name)) for name in checkpoint.names)
        for name in set(checkpoint.names) - checkpoint.joined.keys():
            shards = [shard for row in checkpoint.shards[checkpoint.ranks(name)] for shard in row]
            needed += sum(_bytes_of_codes(shard, name) for shard in shards)
        return needed + sum(path.stat().st_size for path in (source / CARRIED).rglob("*") if path.is_file())
    except Exception:  # files of any other layout may raise anything
        return 0


def _bytes_of_codes(shard: Any, name: str) -> int:
    from coat_dist.checkpoint.universal.codes import groups_within
    from coat_dist.optim.state import CODE_KEYS

    if (layout := shard.layout(name)) is None:  # fp32 moments
        return 0
    flat, start, numel = shard.places[name]
    groups, starts = groups_within(0, start, numel, layout["group_size"])
    return starts.nbytes + sum(shard.state[flat][key][groups].nbytes for key in CODE_KEYS)  # views: nothing is read


def say_full(problem: Exception, folder: Path, needed: int) -> str | None:
    """What is said of an error of writing into ``folder`` for want of room; None of any other.

    Args:
        problem: of the system or of torch.save.
        folder: where it was to be written; what is in it of a conversion that failed has been removed.
        needed: as :func:`bytes_needed` says.
    """
    if not any(text in str(problem) for text in _FULL):
        return None
    wanted = f", {needed:,} or more are needed" if needed else ""
    return f"the disk is full, or a quota or limit is reached: {room(folder):,} bytes are free{wanted}"
