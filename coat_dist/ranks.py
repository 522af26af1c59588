"""Ranks that go on together or stop together. Without torch.distributed, this process is the only rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from .config import CoatConfigError

__all__ = ["attempt", "check_same_on_all_ranks", "gather", "on_rank_0", "raise_everywhere", "rank_and_world"]

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


def attempt(work: Callable[[], T]) -> tuple[list[T | None], dict[int, str]]:
    """Do this rank's part, whatever it raises: the other ranks wait here, and learn of it.

    Args:
        work: must not use collectives.

    Returns:
        What each rank's part returned, in rank order (None where it raised), and the text of each error by rank: a
        ``ValueError`` says what is wrong by itself, any other error is told with its type.
    """
    result, text = None, None
    try:
        result = work()
    except Exception as problem:
        text = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
    everyone = gather((result, text))
    return [r for r, _ in everyone], {rank: t for rank, (_, t) in enumerate(everyone) if t is not None}


def raise_everywhere(check: Callable[[], list[str]], accepted: str = "") -> None:
    """Raise on every rank what any rank finds, so that none waits in a collective for one that raised.

    Args:
        check: returns one line for each problem, or raises. Must not use collectives.
        accepted: last line of the error.

    Raises:
        ValueError: at most four different lines, and ``accepted``.
    """
    found, errors = attempt(check)
    lines = [line for rank, mine in enumerate(found) for line in ([errors[rank]] if mine is None else mine)]
    lines = list(dict.fromkeys(lines))
    if lines:
        raise ValueError("\n".join([*lines[:4], accepted]).strip())


def check_same_on_all_ranks(values: Mapping[str, Any]) -> None:
    """Compare what each rank believes to run; ranks that differ would train on silently or hang.

    A collective: under NCCL each rank's device must be the current one.

    Args:
        values: plain values by what they are, the same keys on all ranks; ranks exchange digests of them.

    Raises:
        CoatConfigError: on every rank; names what differs and which ranks hold the minority.
    """
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}
    everyone = gather({key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()})
    different = []
    for key in dict.fromkeys(k for d in everyone for k in d):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(everyone):
            ranks.setdefault(one.get(key, "absent"), []).append(rank)
        if len(ranks) > 1:
            minority = sorted(r for group in sorted(ranks.values(), key=len)[:-1] for r in group)
            different.append(f"{key}: rank(s) {', '.join(map(str, minority))} differ from the others")
    if different:
        raise CoatConfigError("ranks were started differently: " + "; ".join(different))
