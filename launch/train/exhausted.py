"""The message of a run that is out of memory: what took how much, and what other ZeRO stages and
states would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.memory.fit import choice_lines, choice_rows, table
from launch.memory.run import Run
from launch.train.plan import Plan

_WORDS = ("out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In errors that are no ``torch.OutOfMemoryError``: NCCL's, cuBLAS's, those of a CPU's
allocator.
"""


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
        raise OutOfMemory(_explanation(p, loop(), problem)) from None


def _explanation(p: Plan, loop: Any, problem: BaseException) -> str:
    """What was going on, what holds how much by the plan and as measured, what else would fit."""
    doing = "while the engine was built" if loop is None else loop.doing
    lines = [f"out of memory {doing}, with micro-batch {p.batch.micro}: {problem}"]
    try:
        run = Run.of_plan(p)
        lines += ["by the plan:", table(run), "other choices, with this micro-batch:"]
        lines += choice_lines(choice_rows(run))
    except CoatConfigError as reason:
        lines.append(f"there is no plan of what takes how much: {reason}")
    if loop is not None and loop.memory is not None and loop.memory.to_dict():
        lines += ["as measured in the first step:", loop.memory.table()]
    return "\n".join(lines)
