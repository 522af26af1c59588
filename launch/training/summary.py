"""What a run was, in a few numbers: printed at its end, and written as ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Summary"]


class Summary:
    """Collects records of ``metrics.jsonl``, those of earlier starts of the run too.

    Args:
        earlier: records that the run continues from.
    """

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps = 0
        self._seconds = 0.0
        self._tokens = 0.0
        self._peak = 0
        self._last: Mapping[str, Any] = {}
        self._best: tuple[float, int] | None = None
        self._test: float | None = None
        for record in earlier:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one step; a number that is None was not finite."""
        self._steps += 1
        seconds = record.get("step_time") or 0.0
        self._seconds += seconds
        self._tokens += seconds * (record.get("tokens_per_second") or 0.0)
        self._peak = max(self._peak, record.get("peak_memory_bytes") or 0)
        self._last = record
        valid = record.get("valid_loss")
        if valid is not None and (self._best is None or valid < self._best[0]):
            self._best = valid, record["step"]
        if record.get("test_loss") is not None:
            self._test = record["test_loss"]

    def to_dict(self, *, wall_seconds: float, ranks: int) -> dict[str, Any]:
        """The numbers. ``wall_seconds``: of this start, evaluation and saving included."""
        speed = self._tokens / self._seconds if self._seconds else None
        return {
            "recorded_steps": self._steps,
            "tokens": round(self._tokens),
            "seconds": self._seconds,
            "wall_seconds": wall_seconds,
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": None if speed is None else speed / ranks,
            "peak_memory_bytes": self._peak,
            "loss": self._last.get("loss"),
            "best_valid_loss": self._best[0] if self._best else None,
            "best_valid_step": self._best[1] if self._best else None,
            "test_loss": self._test,
        }
