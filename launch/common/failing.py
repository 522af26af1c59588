"""How a failed rank exits: with one line, printed once, that torchrun's report has, too.

Most errors are raised on all ranks: rank 0 prints them, and stays for a moment, because it may hold
the store that the others ask. The launcher ends all ranks when one has failed.
"""

from __future__ import annotations

import signal
import sys
import time
import zlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coat_dist import nodes
from coat_dist.deepspeed.heartbeat import who
from coat_dist.ranks import tell_torchrun

WAIT = 1.5
"""Seconds in which the rank that fails first has printed its line."""
WAIT_FOR_LAUNCHER = 10.0
"""Seconds in which a launcher ends the other ranks, once rank 0 has exited."""


def end(line: str, rank: int, kind: str = "", consequence: bool = False) -> None:
    """Print ``line`` of a rank that exits, unless another rank has.

    Args:
        kind: of errors whose text differs between ranks (what their GPU holds): the first rank
            prints its own.
        consequence: the error is that another rank has ended: what that one has printed is enough.
    """
    # SIGTERM is from a launcher whose other rank has failed: there is nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if consequence else signal.SIG_DFL)
    tell_torchrun(f"error: {line}")
    together = dist.is_initialized()
    if together:
        if consequence:
            time.sleep(3 * WAIT)
        elif rank:
            time.sleep(WAIT)
    elif rank:  # rank 0 most likely has the same line
        time.sleep(WAIT_FOR_LAUNCHER)
    if not together or _is_first(kind or line, consequence):
        host = nodes.say_host(rank) or (f" (host {nodes.host()})" if nodes.several_nodes() else "")
        print(f"{f'rank {rank}{host}: ' if rank else ''}error: {line}", file=sys.stderr, flush=True)
    if rank == 0 and together and dist.get_world_size() > 1:
        time.sleep(2 * WAIT)


def end_of_collective(problem: Exception, rank: int) -> None:
    """:func:`end` of a rank whose collective failed because of another, which is named where it
    can be.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in end()
    found = who()
    name = found[0] if found else "another rank has ended or did not come"
    line = (
        f"a collective failed, because {name}" if dist.is_initialized() else "the ranks cannot meet"
    )
    if found is None or found[1]:
        end(f"{line}: {problem}", rank, consequence=True)
    else:  # another rank prints it
        tell_torchrun(f"error: {line}: {problem}")
        time.sleep(WAIT)


def _is_first(what: str, consequence: bool) -> bool:
    """Whether no other rank has printed this or, before a consequence, anything."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        # That of collectives would keep this rank for minutes.
        store.set_timeout(timedelta(seconds=WAIT))
        store = store.clone()  # another thread's connection may be waiting
        any_before = store.add("coat_dist/error", 1) > 1
        return (
            not any_before
            if consequence
            else store.add(f"coat_dist/error/{zlib.crc32(what.encode())}", 1) == 1
        )
    except RuntimeError:  # it has gone with rank 0
        return True
