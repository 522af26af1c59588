"""The message of a run that is out of memory: what it was doing, and what the first step held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launch.train.plan import Plan

_WORDS = ("out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors that are no ``torch.OutOfMemoryError``: NCCL's, cuBLAS's, those of a CPU's
allocator.
"""
_ADVICE = "the same command with --dry-run prints what takes how much, and which settings fit"


class OutOfMemory(RuntimeError):
    """The whole message."""


def is_out_of_memory(problem: BaseException | None) -> bool:
    """Whether more memory was requested than there is."""
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)


@contextmanager
def explained(p: Plan, loop: Callable[[], Any]) -> Iterator[None]:
    """Turn running out of memory into :class:`OutOfMemory`.

    Args:
        loop: returns the training loop, or None while the engine is built.
    """
    try:
        yield
    except RuntimeError as problem:
        if isinstance(problem, OutOfMemory) or not is_out_of_memory(problem):
            raise
        running = loop()
        doing = "while the engine was built" if running is None else running.doing
        lines = [f"out of memory {doing}, with micro-batch {p.batch.micro}: {problem}"]
        if running is not None and running.memory is not None and running.memory.to_dict():
            lines += ["as measured in the first step:", running.memory.table()]
        raise OutOfMemory("\n".join([*lines, _ADVICE])) from None
