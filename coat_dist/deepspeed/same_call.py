"""A rank without block or CoatAdamW, beside ranks that have one: named while they wait for it.

Ranks with a block compare what they run. A rank without one builds DeepSpeed's own engine and never comes, and both
sides would wait for each other until the collectives' timeout. So a call that is passed on to DeepSpeed leaves a note
in torch.distributed's store, without any waiting, and ranks that compare look there for those that do not come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..config import CoatConfigError
from ..ranks import rank_and_world
from .heartbeat import group_timeout

__all__ = ["PATIENCE", "leave_note", "wait_for_the_others"]

PATIENCE = 10.0
"""Seconds that a rank which called DeepSpeed's own ``initialize`` has to come to ours as well: a program may build
engines of both kinds, on some ranks one more."""

_passed_on = _compared = 0


def leave_note(given: Mapping[str, Any]) -> None:
    """Say that this rank's call of ``deepspeed.initialize`` is passed on as it is.

    Args:
        given: its arguments by name. Where ranks do not know one another yet, they meet here, by the very call with
            which DeepSpeed begins.
    """
    global _passed_on
    _passed_on += 1
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several and not dist.is_initialized() and given.get("dist_init_required") is not False:
        import deepspeed

        options = ("distributed_port", "dist_init_required")
        deepspeed.init_distributed(**{name: given[name] for name in options if name in given})
    if (store := _store()) is not None:
        store.set(f"coat_dist/passed_on/{dist.get_rank()}", str(_passed_on))


def wait_for_the_others() -> None:
    """Wait until every rank is here, as the collective behind it would, and name those that went elsewhere.

    Raises:
        CoatConfigError: a rank has called DeepSpeed's own ``initialize`` instead.
    """
    global _compared
    _compared += 1
    if (store := _store()) is None:
        return
    rank, world = rank_and_world()
    store.set(f"coat_dist/compared/{_compared}/{rank}", "")
    arrived, pause = store.add(f"coat_dist/compared/{_compared}", 1), 0.001
    begun = looked = time.monotonic()
    while arrived < world and time.monotonic() - begun < group_timeout():
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
        arrived = store.add(f"coat_dist/compared/{_compared}", 0)
        if arrived < world and time.monotonic() - looked > PATIENCE:
            if elsewhere := [r for r in range(world) if _is_elsewhere(store, r)]:
                raise CoatConfigError(
                    f'ranks were started differently: "coat" or "CoatAdamW" on rank {rank}, neither of them on '
                    f"rank{'s' if len(elsewhere) > 1 else ''} {', '.join(map(str, elsewhere[:8]))}"
                    f"{', ...' if len(elsewhere) > 8 else ''}"
                )
            looked = time.monotonic()


def _is_elsewhere(store: Any, rank: int) -> bool:
    note = f"coat_dist/passed_on/{rank}"
    here = store.check([f"coat_dist/compared/{_compared}/{rank}"])
    return not here and store.check([note]) and int(store.get(note)) > _passed_on


def _store() -> Any:
    """torch.distributed's, where there are several ranks."""
    return dist.distributed_c10d._get_default_store() if rank_and_world()[1] > 1 else None
