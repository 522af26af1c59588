"""How a rank ends that cannot go on: with one line, after which the screen shows nothing of ours or of torch's.

All ranks have met the same error, most of the time. Rank 0 says it and stays for a moment, because it may hold the
store that the others are connected to, which would complain in lines of their own. The others leave without a word if
they have nothing to add.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coat_dist import nodes
from coat_dist.deepspeed.missing import who
from coat_dist.ranks import tell_torchrun
from launch.training import joining

__all__ = ["PORT", "end", "end_of_collective", "of_a_port"]

PORT = (
    "MASTER_PORT: got {port}, where another program on this host listens, accepted: a free port (--master_port of the "
    "launcher, or in the environment)"
)
KEY = "coat_dist/error"
WAIT = 1.5
"""Seconds in which the rank that fails first has said what it has to say."""
WAIT_FOR_0 = 10.0
"""Seconds for which other ranks leave it to rank 0 where they have not met yet: so much later it may have started."""


def end(line: str, rank: int, consequence: bool = False, once: bool = False, elsewhere: bool = False) -> None:
    """Print ``line`` unless another rank has said it, or a launcher ends this rank because another has failed.

    Args:
        consequence: the error is that another rank has ended: what that one has said is enough.
        elsewhere: a rank on another node has failed before the ranks had met: the first rank of each node says it.
        once: ranks say the same in other words (what their GPU holds): the first one that comes says it.
    """
    # SIGTERM is from a launcher whose other rank has failed: nothing to be saved. A line about that rank comes first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if consequence else signal.SIG_DFL)
    tell_torchrun(f"error: {line}")
    if elsewhere:
        if nodes.my_place().local == 0:
            print(f"{f'rank {rank}{_host(rank)}: ' if rank else ''}error: {line}", file=sys.stderr, flush=True)
        time.sleep(WAIT)  # rank 0 may hold the store in which others look for the reason
        return
    if joining.needed():  # no launcher ends the ranks of other nodes
        if joining.say_why(line):
            print(f"{f'rank {rank}{_host(rank)}: ' if rank else ''}error: {line}", file=sys.stderr, flush=True)
        joining.stay()
        return
    met = dist.is_initialized()
    store = _own_store() if met else None
    if store is None and rank:  # rank 0 most likely says the same, and the launcher ends this rank
        time.sleep(2 * WAIT if met else WAIT_FOR_0)
    said = None
    if once and store is not None and not _first(store):
        time.sleep(WAIT if rank else 2 * WAIT)
        return
    if store is not None and (rank or consequence):
        said = _said(store, 3 * WAIT if consequence else WAIT)
    if said is None or not (consequence or said == line):
        print(f"{f'rank {rank}{_host(rank)}: ' if rank else ''}error: {line}", file=sys.stderr, flush=True)
        _say(store, line)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank == 0 and store is not None and dist.get_world_size() > 1:
        time.sleep(2 * WAIT)


def of_a_port(problem: BaseException) -> bool:
    """Whether the store could not be opened because its port is taken."""
    return "failed to listen" in str(problem) and "EADDRINUSE" in str(problem)


def _host(rank: int) -> str:
    return nodes.say_host(rank) or (f" (host {nodes.host()})" if nodes.several_nodes() else "")


def end_of_collective(problem: Exception, rank: int) -> None:
    """:func:`end` of a rank whose collective failed because of another, which is named where it can be."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in end()
    found = who()
    why = found[0] if found is not None else "another rank has ended or did not come"
    line = f"a collective failed, because {why}: {problem}"
    if found is not None and not found[1]:  # another rank that is there says it
        tell_torchrun(f"error: {line}")
        time.sleep(WAIT)
        return
    end(line, rank, consequence=True)


def _own_store() -> Any:
    """A connection of its own to the default store, since another thread's may be waiting; None where it has gone."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        store.set_timeout(timedelta(seconds=WAIT))  # that of collectives would keep this rank for minutes
        return store.clone()
    except RuntimeError:
        return None


def _first(store: Any) -> bool:
    """Whether no other rank has asked this before; a store that has gone is no reason to be silent."""
    try:
        return store.add(f"{KEY}/once", 1) == 1
    except RuntimeError:
        return True


def _said(store: Any, seconds: float) -> str | None:
    """What another rank has printed as its last line, if one does so within a moment."""
    try:
        store.set_timeout(timedelta(seconds=seconds))
        return store.get(KEY).decode()
    except (RuntimeError, ValueError):  # nothing came, or the store has gone
        return None


def _say(store: Any, line: str) -> None:
    with suppress(RuntimeError):
        if store is not None:
            store.set(KEY, line)
