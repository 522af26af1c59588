"""Ranks of several nodes that wait for one another at the start, and learn why one of them will not come.

On one node a launcher ends all ranks when one fails. On several, ranks of the others would wait for it until the
timeout of collectives. So each says in the store where they meet that it has come, and one that fails before says why.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from coat_dist import nodes
from coat_dist.ranks import say_ranks

__all__ = ["NotComing", "meet", "say_why"]

PATIENCE = 60.0
"""Seconds in which a rank that fails reaches the store, which rank 0 of another node may be about to open."""
STAY = 20.0
"""Seconds for which the rank that holds the store stays, so that others can read why it fails."""


class NotComing(RuntimeError):
    """Another rank will not come; the message names it, or those that are missing."""


def meet(timeout: timedelta | None) -> None:
    """Wait until all ranks have come, if there are several nodes; torch.distributed is not initialized yet.

    Raises:
        NotComing: one has failed before; or some have not come within ``timeout``, which are named.
    """
    if not _needed():
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


def say_why(line: str) -> None:
    """Tell ranks on other nodes that wait in :func:`meet` why this one will not come. Does nothing on one node."""
    if not _needed() or dist.is_initialized():
        return
    rank, world = _rank_and_world()
    with suppress(RuntimeError, ValueError):
        store = _store(timedelta(seconds=PATIENCE))
        store.set("failed", f"rank {rank} (host {nodes.host()}) ended at its start: {line}")
        if rank == 0 and not _agents():  # the store ends with this process
            end = time.monotonic() + STAY
            store.set("at/0", nodes.host())
            while time.monotonic() < end and not all(store.check([f"at/{one}"]) for one in range(world)):
                time.sleep(0.2)
            time.sleep(1.0)
        store.set(f"at/{rank}", nodes.host())


def _needed() -> bool:
    return nodes.several_nodes() and all(n in os.environ for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


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
