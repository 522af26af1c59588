"""A run that is out of memory ends with one message: what took how much, and which settings would save how much."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.plan.report import size, table
from launch.plan.run import Run
from launch.plan.search import savings
from launch.train.plan import Plan

__all__ = ["STATUS", "OutOfMemory", "explained", "explanation", "is_out_of_memory"]

STATUS = 5
GIB = 2**30
_WORDS = ("out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Of errors that are no ``torch.OutOfMemoryError``: NCCL's, cuBLAS's, those of a CPU's allocator."""


class OutOfMemory(RuntimeError):
    """The whole message."""


def is_out_of_memory(problem: BaseException | None) -> bool:
    """Whether memory was asked for that is not there."""
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)


def explanation(p: Plan, doing: str, problem: BaseException, report: Any = None) -> str:
    """The message: what was going on, what holds how much by the plan and as measured, what would save most.

    Args:
        doing: "while ...".
        report: a ``MemoryReport``, or None.
    """
    first = str(problem).split("\n")[0]
    lines = [f"out of memory {doing}, with micro-batch {p.batch.micro}: {'. '.join(first.split('. ')[:2])}"]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        lines.append(
            f"torch had allocated {torch.cuda.memory_allocated() / GIB:.2f} GiB (at most "
            f"{torch.cuda.max_memory_allocated() / GIB:.2f}) and reserved {torch.cuda.memory_reserved() / GIB:.2f} of "
            f"the GPU's {total / GIB:.2f} GiB, of which {free / GIB:.2f} are free"
        )
    try:
        run = Run.of_plan(p)
        lines += ["by the plan:", table(run), "what would save most, one at a time:"]
        lines += [f"  {size(one.bytes):>11}  {one.what}" for one in savings(run)]
    except CoatConfigError as reason:
        lines.append(f"there is no plan of what takes how much: {reason}")
    if report is not None and report.to_dict():
        lines += ["as measured in the first step:", report.table()]
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if torch.cuda.is_available() and "expandable_segments:True" not in conf:
        lines.append("PYTORCH_ALLOC_CONF=expandable_segments:True is not set, so that free memory may lie in pieces")
    return "\n".join(lines)


@contextmanager
def explained(p: Plan, loop: Callable[[], Any]) -> Iterator[None]:
    """Turns running out of memory into :class:`OutOfMemory`.

    Args:
        loop: gives the training loop, which says what is going on; None while the engine is built.
    """
    try:
        yield
    except RuntimeError as problem:
        if isinstance(problem, OutOfMemory) or not is_out_of_memory(problem):
            raise
        doing, report = "while the engine was built", None
        if (running := loop()) is not None:
            doing, report = running.doing, running.first_report
        raise OutOfMemory(explanation(p, doing, problem, report)) from None
