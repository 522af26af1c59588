"""Which rank the others wait for: of every step the time that a rank needs by itself, without what it waits for others.

Ranks tell their times in the collective that sums the loss, which every step has anyway. Measured is what no collective
is in: getting the batch, and the forward pass. With tensor or expert parallelism or ZeRO-3 there are collectives in the
forward pass, in which all ranks take as long as the slowest: then only what comes before it counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from coat_dist import nodes
from coat_dist.ranks import gather, rank_and_world
from launch.log_level import say

__all__ = ["REPORTS", "THRESHOLD", "RankTimes"]

THRESHOLD = 1.25
"""Times as long as without that rank: from here on a step counts as slowed down."""
REPORTS = 5
"""Steps in a row, slowed down by the same rank, after which there is a warning."""


class RankTimes:
    """One rank's clock, and the judgement on those of all.

    Args:
        device: of this rank. On a GPU the forward pass is timed there, by events that are read when the step's numbers
            are, without a synchronization of their own.
        whole_forward: whether the forward pass is free of collectives.
    """

    def __init__(self, device: torch.device, *, whole_forward: bool) -> None:
        self._whole, self._on_gpu = whole_forward, whole_forward and device.type == "cuda"
        self._hosts = gather(nodes.host())
        self._seconds, self._began = 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        self._used = 0
        self._slow, self._in_a_row, self._warned = -1, 0, set[int]()

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._on_gpu:
            if self._used == len(self._events):
                self._events.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore
            self._events[self._used][0].record()
        else:
            self._began = time.perf_counter()

    def batch_is_there(self) -> None:
        """The forward pass is next."""
        if not self._whole:
            self._seconds += time.perf_counter() - self._began

    def forward_done(self) -> None:
        """The backward pass is next."""
        if self._on_gpu:
            self._events[self._used][1].record()
            self._used += 1
        elif self._whole:
            self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Of the micro-batches since the last call; the GPU has done them."""
        for begun, done in self._events[: self._used]:
            if done.query():  # always, where the gradient norm has been read
                self._seconds += begun.elapsed_time(done) / 1000
        taken, self._seconds, self._used = self._seconds, 0.0, 0
        return taken

    def judge(self, seconds: Sequence[float], step: int, step_time: float) -> dict[str, Any]:
        """What the record of a step says, on rank 0: ``slowest_rank`` and ``slowest_rank_time_ratio``, where there are
        several ranks and anything was measured.

        Args:
            seconds: what each rank's :meth:`seconds` gave.
            step_time: seconds of the whole step, in which the others have waited for the slowest.
        """
        if len(seconds) < 2 or rank_and_world()[0] or not any(seconds):
            return {}
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(s for rank, s in enumerate(seconds) if rank != slowest)
        ratio = step_time / max(step_time - (seconds[slowest] - others), others, 1e-9)
        ratio = max(ratio, 1.0)
        self._in_a_row = self._in_a_row + 1 if ratio >= THRESHOLD and slowest == self._slow else int(ratio >= THRESHOLD)
        self._slow = slowest
        if self._in_a_row >= REPORTS and slowest not in self._warned:
            self._warned.add(slowest)
            say(
                f"warning: rank {slowest} ({self._hosts[slowest]}) is slow: the others waited for it in steps "
                f"{step - REPORTS + 1} to {step}, the last of which took {ratio:.2f} times as long as without that",
                "warning",
            )
        return {"slowest_rank": slowest, "slowest_rank_time_ratio": ratio}
