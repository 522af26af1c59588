"""A run that is out of memory ends with one message: what took how much, and which settings would save how much."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.planning.report import size, table
from launch.planning.run import Run
from launch.planning.search import savings
from launch.training.plan import Plan

__all__ = ["STATUS", "Explain", "OutOfMemory", "explanation", "is_out_of_memory"]

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


class Explain:
    """Turns running out of memory into :class:`OutOfMemory`: push :meth:`leave` on an ``ExitStack``."""

    def __init__(self, p: Plan) -> None:
        self._plan, self._loop, self._report = p, None, None

    def watch(self, loop: Any) -> None:
        """From now on ``loop`` says what is going on."""
        self._loop, self._report = loop, loop.memory

    def leave(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``__exit__`` of a context.

        Raises:
            OutOfMemory: in place of ``problem``, where that is what it means.
        """
        if is_out_of_memory(problem) and not isinstance(problem, OutOfMemory):
            assert problem is not None
            doing = "while the engine was built" if self._loop is None else self._loop.doing
            message = explanation(self._plan, doing, problem, self._report)
            raise OutOfMemory(message) from None
