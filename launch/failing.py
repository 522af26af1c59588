"""How a failed rank exits: with one line, printed once, that the other ranks and torchrun's report have, too.

Most errors are raised on all ranks: rank 0 prints them, and stays for a moment, because it may hold the store that the
others ask. On one node a launcher ends all ranks when one has failed. Ranks of other nodes would wait for it at their
start until the timeout of collectives, so ranks of several nodes meet in the store before torch.distributed begins, and
one that has failed says why there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coat_dist import nodes
from coat_dist.deepspeed.heartbeat import who
from coat_dist.ranks import say_ranks, tell_torchrun

__all__ = ["NotComing", "end", "end_of_collective", "meet", "needed", "tell_starting"]

WAIT = 1.5
"""Seconds in which the rank that fails first has printed its line."""
WAIT_FOR_LAUNCHER = 10.0
"""Seconds in which a launcher ends the other ranks, once rank 0 has exited."""
STAY = timedelta(seconds=60)
"""For which a failed rank waits for ranks of other nodes that are still starting."""
_kept: list[Any] = []
"""The store of rank 0 ends with the object."""


class NotComing(RuntimeError):
    """Another rank will not come; the message names it."""


def end(line: str, rank: int, kind: str = "", consequence: bool = False) -> None:
    """Print ``line`` of a rank that exits, unless another rank has.

    Args:
        kind: ranks have the same error in other words (what their GPU holds): the first one prints it.
        consequence: the error is that another rank has ended: what that one has printed is enough.
    """
    # SIGTERM is from a launcher whose other rank has failed: nothing to be saved. A line about that rank comes first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if consequence else signal.SIG_DFL)
    tell_torchrun(f"error: {line}")
    if at_once := rank == 0 and not dist.is_initialized():
        _print(line, rank)
    if dist.is_initialized():
        time.sleep(3 * WAIT if consequence else WAIT if rank else 0.0)
        first = _is_first(kind or line, consequence)
    elif needed():
        first = tell_starting(line, rank)
    else:  # rank 0 most likely has the same line
        time.sleep(WAIT_FOR_LAUNCHER if rank else 0.0)
        first = True
    if first and not at_once:
        _print(line, rank)
    if rank == 0 and dist.is_initialized() and dist.get_world_size() > 1:
        time.sleep(2 * WAIT)


def end_of_collective(problem: Exception, rank: int) -> None:
    """:func:`end` of a rank whose collective failed because of another, which is named where it can be."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in end()
    found = who()
    line = f"a collective failed, because {found[0] if found else 'another rank has ended or did not come'}: {problem}"
    if not dist.is_initialized():
        line = f"the ranks cannot meet: {problem}"
    if found is None or found[1]:
        end(line, rank, consequence=True)
    else:  # another rank prints it
        tell_torchrun(f"error: {line}")
        time.sleep(WAIT)


def needed() -> bool:
    """Whether ranks of several nodes have yet to meet."""
    known = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return known and nodes.several_nodes() and not dist.is_initialized()


def meet(timeout: timedelta | None) -> None:
    """Wait until all ranks have come, if there are several nodes; torch.distributed is not initialized yet.

    Raises:
        NotComing: some have failed, or have not come within ``timeout``. Printed already, by the first rank of a node.
    """
    if not needed():
        return
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    came = _come("", limit)
    missing = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank not in came]
    why = next((f"rank {rank} {said}" for rank, said in came.items() if said), None)
    if why is None and missing:
        why = f"{say_ranks(missing)} did not come within {limit.total_seconds():.0f} s, accepted: all ranks"
    if why is not None:
        tell_torchrun(f"error: {why}")
        if nodes.my_place().local == 0:
            _print(why, int(os.environ["RANK"]))
        raise NotComing(why)


def _come(failed: str, limit: timedelta) -> Mapping[int, str]:
    """Come to the store, with the reason if this rank has failed; what each rank came with, once all have."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and not agents
    _kept.append(dist.TCPStore(address, port, world, holds, limit, wait_for_workers=False, multi_tenant=True))
    store = dist.PrefixStore(f"coat_dist/meet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _kept[-1])
    store.set(str(rank), failed)
    with suppress(RuntimeError):  # some have not come
        store.wait([str(one) for one in range(world)], limit)
    came = {one: store.get(str(one)).decode() for one in range(world) if store.check([str(one)])}
    if len(came) < world or any(came.values()):
        time.sleep(WAIT)  # the store may end with this process, and others are about to read
    return came


def tell_starting(line: str, rank: int) -> bool:
    """Tell the ranks that wait in :func:`meet` why this one ends; whether no lower one has ended with this line."""
    said = f"(host {nodes.host()}) ended at its start: {line}"
    try:
        came = _come(said, STAY)
    except (RuntimeError, ValueError):  # there is no store
        return True
    return not any(one < rank and text.endswith(f"ended at its start: {line}") for one, text in came.items())


def _is_first(what: str, consequence: bool) -> bool:
    """Whether no other rank has printed this or, of a consequence, anything."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        store.set_timeout(timedelta(seconds=WAIT))  # that of collectives would keep this rank for minutes
        store = store.clone()  # another thread's connection may be waiting
        any_before = store.add("coat_dist/error", 1) > 1
        return not any_before if consequence else store.add(f"coat_dist/error/{zlib.crc32(what.encode())}", 1) == 1
    except RuntimeError:  # it has gone with rank 0
        return True


def _print(line: str, rank: int) -> None:
    host = nodes.say_host(rank) or (f" (host {nodes.host()})" if nodes.several_nodes() else "")
    print(f"{f'rank {rank}{host}: ' if rank else ''}error: {line}", file=sys.stderr, flush=True)
