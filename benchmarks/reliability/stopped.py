"""Ranks that die or stop answering in the middle of work of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import disk
from .bench import STEPS, Bench, Case, describe

__all__ = ["cases"]

TIMEOUT = 10.0
"""Of collectives, seconds."""
MORE = 60.0


def cases(bench: Bench, few: int | None) -> Iterator[Case]:
    """The other rank must end within the timeout of collectives and a minute, and say which rank did not come."""
    for rank in (0, 1):
        for how in ("kill", "stop"):
            if few is not None and (how == "kill" or rank):
                continue
            name = f"rank {rank} {'killed' if how == 'kill' else 'stopped'} in a step"
            step: list[list[Any]] = [["train", STEPS], ["end", rank, how], ["train", STEPS]]
            yield Case(f"{'dead' if how == 'kill' else 'hung'} rank", bench.stage, name, *_one(bench, rank, step, how))
        if few is None:
            folder = str(bench.fresh(bench.a))
            middle = len(bench.events[rank]) // 2
            actions: list[list[Any]] = [["load", folder], ["train", STEPS]]
            actions += [["arm", folder, {str(rank): [disk.STOP_BEFORE, middle]}], ["save", folder], ["train", STEPS]]
            name = f"rank {rank} stopped in a save"
            yield Case("hung rank", bench.stage, name, *_one(bench, rank, actions, "stop"))


def _one(bench: Bench, rank: int, actions: Sequence[Sequence[Any]], how: str) -> tuple[str, bool]:
    hung = rank if how == "stop" else None
    out = bench.run(actions, limit=TIMEOUT + MORE, hung=hung, timeout=TIMEOUT)
    other = 1 - rank
    if out.status[other] is None:
        return f"rank {other} waits for more than {TIMEOUT + MORE:.0f} s", False
    if out.status[other] == 0:
        return f"rank {other} goes on", False
    after = f"rank {other} ends after {_after(out, other):.0f} s (timeout {TIMEOUT:.0f} s)"
    names = f"rank {rank}" in out.screen(other)
    if how == "kill":
        return after, True
    return (f"{after} and names rank {rank}" if names else f"{after}: {describe(out)}"), names


def _after(out: Any, rank: int) -> float:
    """Seconds from the last thing that the rank has reported to its end."""
    began = out.reports[rank][0]["time"]
    last = max((line["time"] for line in out.reports[rank] if "error" not in line), default=began)
    return out.ended[rank] - last
