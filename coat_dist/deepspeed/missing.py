"""A collective that failed on this rank because of another: which one that is, and where.

gloo says that a connection was closed, or that nothing came in time; neither names a rank. ``heartbeat.py``'s threads
are asked: a rank that has ended does not answer, and one that is at another place than in a collective did not come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..ranks import of_another_rank, tell_torchrun
from . import heartbeat
from .timeouts import follow_default_group

__all__ = ["start", "who"]

PATIENCE = 1.0
"""Seconds in which a rank that is there answers."""


def who() -> tuple[str, bool] | None:
    """Whom the failed collective waited for, and whether it is this rank that should say so: the first that is there.

    None where nobody can be named: no thread runs, or all others are in a collective, too.
    """
    beats = heartbeat.running()
    if beats is None:
        return None
    answers = beats.ask(PATIENCE)
    first = all(rank > beats.rank or answer is None for rank, answer in answers.items())
    gone = [
        f"rank {rank} ({beats.host(rank)}) has ended or does not answer"
        for rank, answer in answers.items()
        if answer is None
    ]
    if gone:
        return ", ".join(gone), first
    late = [
        f"rank {rank} ({beats.host(rank)}; after step {answer['step']} at {answer['place']}) did not come"
        for rank, answer in answers.items()
        if answer is not None and not answer["waits"]  # one that asks, too, has waited
    ]
    return (", ".join(late), first) if late else None


_hook: Callable[..., Any] | None = None


def start(engine: Any) -> None:
    """Let ranks hear of one another (:func:`heartbeat.start`), collectives of all groups wait as long as those of the
    default one, and a program that ends with such an error say below its traceback which rank it was. A collective."""
    global _hook
    follow_default_group()
    heartbeat.start(engine)
    if sys.excepthook is not _named:
        _hook, sys.excepthook = sys.excepthook, _named


def _named(kind: type[BaseException], problem: BaseException, trace: Any) -> None:
    assert _hook is not None
    _hook(kind, problem, trace)
    if isinstance(problem, Exception) and of_another_rank(problem) and (found := who()) is not None:
        line = f"error: a collective failed, because {found[0]}"
        print(line, file=sys.stderr, flush=True)
        tell_torchrun(line)
