"""Ranks that go on together or stop together. Without torch.distributed, this process is the only rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["gather", "on_rank_0", "rank_and_world"]

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(mine: T) -> list[T]:
    """What every rank gives, in rank order; also a barrier."""
    world = rank_and_world()[1]
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def on_rank_0(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 alone; every rank gets its result, or raises what it raised.

    For what is read from a shared folder that ranks write to later: if each looked for itself, one that is late would
    see what another has written since.
    """
    rank, world = rank_and_world()
    answer: list[Any] = [None, None]
    if rank == 0:
        try:
            answer[0] = function()
        except Exception as problem:
            answer[1] = problem
    if world > 1:
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
