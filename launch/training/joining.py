"""Ranks of several nodes that wait for one another at the start, and learn why one of them will not come.

On one node a launcher ends all ranks when one fails. On several, ranks of the others would wait for it until the
timeout of collectives. So each says in the store where they meet that it has come, and one that fails before says why.
"""

from __future__ import annotations

import os
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coat_dist import nodes
from coat_dist.ranks import say_ranks

__all__ = ["NotComing", "meet", "needed", "say_why", "stay"]

PATIENCE = 20.0
"""Seconds in which a rank that fails reaches the store, which rank 0 of another node may be about to open."""
STAY = 60.0
"""Seconds for which a rank stays at most that fails where the store is, so that others can read why it fails."""


class NotComing(RuntimeError):
    """Another rank will not come; the message names it, or those that are missing."""


def meet(timeout: timedelta | None) -> None:
    """Wait until all ranks have come, if there are several nodes; torch.distributed is not initialized yet.

    Raises:
        NotComing: one has failed before; or some have not come within ``timeout``, which are named.
    """
    if not needed():
        return
    rank, world = _rank_and_world()
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    store = _store(limit)
    store.set(f"at/{rank}", nodes.host())
    end, pause = time.monotonic() + limit.total_seconds(), 0.01
    missing = list(range(world))
    while missing:
        if store.check(["failed"]):
            raise NotComing(store.get("failed").decode())
        missing = [one for one in missing if not store.check([f"at/{one}"])]
        if missing and time.monotonic() > end:
            here = sorted({store.get(f"at/{one}").decode() for one in set(range(world)) - set(missing)})
            raise NotComing(
                f"{say_ranks(missing)} of {world} did not come within {limit.total_seconds():.0f} s, accepted: all of "
                f"them (there are ranks of {', '.join(here[:8])}; start as many nodes, which reach one another)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def say_why(line: str) -> bool:
    """Tell ranks that wait in :func:`meet` why this one will not come. :func:`needed` holds.

    Returns:
        Whether this rank is to print the line: no other has come here with the same one.
    """
    rank, _ = _rank_and_world()
    try:
        store = _store(timedelta(seconds=PATIENCE))
        first = store.add(f"said/{zlib.crc32(line.encode())}", 1) == 1
        store.set("failed", f"rank {rank} (host {nodes.host()}) ended at its start: {line}")
        store.set(f"at/{rank}", nodes.host())
        return first
    except (RuntimeError, ValueError):  # there is no store
        return True


def stay() -> None:
    """Where the store ends with this node's processes: wait until the other ranks can have read in it."""
    _, world = _rank_and_world()
    if os.environ.get("GROUP_RANK", os.environ["RANK"]) != "0":
        return
    with suppress(RuntimeError, ValueError):
        store, end = _store(timedelta(seconds=PATIENCE)), time.monotonic() + STAY
        while time.monotonic() < end and not all(store.check([f"at/{one}"]) for one in range(world)):
            time.sleep(0.2)
        time.sleep(1.5)


def needed() -> bool:
    """Whether ranks of several nodes have yet to meet."""
    known = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return known and nodes.several_nodes() and not dist.is_initialized()


def _rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _agents() -> bool:
    """Whether torchrun holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout: timedelta) -> Any:
    """The one that ``init_process_group`` is going to use, too."""
    rank, world = _rank_and_world()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0 and not _agents(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    kept.append(store)
    return dist.PrefixStore(f"coat_dist/joining/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


kept: list[Any] = []
"""The store of rank 0 ends with the object."""
