"""Losses of runs as numbers that can be drawn and compared: series by step, smoothing, the gap between two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Gap", "gap", "series", "smoothed"]


def series(records: Iterable[Mapping[str, Any]], key: str) -> dict[int, float]:
    """The finite numbers under ``key`` by step, in order; of a step that is there twice, the later record's."""
    found: dict[int, float] = {}
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            found[record["step"]] = float(value)
        else:
            found.pop(record["step"], None)
    return dict(sorted(found.items()))


def smoothed(values: Sequence[float], amount: float) -> list[float]:
    """Each value with those before it.

    Args:
        amount: 1 or more: the mean of so many values (of fewer at the beginning); below 1: an exponential moving
            average that gives the past this weight, as TensorBoard does, divided by the weights so far.
    """
    if amount >= 1:
        window, sums = int(amount), [0.0]
        for value in values:
            sums.append(sums[-1] + value)
        return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(values))]
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = amount * total + (1 - amount) * value, amount * weight + (1 - amount)
        result.append(total / weight)
    return result


@dataclass(frozen=True)
class Gap:
    """How far a run's loss is from a baseline's."""

    steps: list[int]  # steps at which both have a finite loss
    relative: list[float]  # (run - baseline) / baseline at these, of smoothed losses
    one_only: int  # steps that one of the two does not have, beyond its end or before its beginning, too
    not_finite: int  # steps that both have, and at which a loss is missing, not finite or, of the baseline, zero

    @property
    def at_the_end(self) -> float:
        """Mean over the last tenth of the steps."""
        last = self.relative[-max(1, len(self.relative) // 10) :]
        return sum(last) / len(last)


def gap(
    run: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    key: str = "loss",
    smooth: float = 1,
) -> Gap:
    """Compare two runs step by step. Both are smoothed over the same steps: those at which both have a loss.

    Args:
        run, baseline: records of ``metrics.jsonl``.
        key: "loss" or "valid_loss".
        smooth: see :func:`smoothed`.
    """
    ours, theirs = series(run, key), series(baseline, key)
    both = {r["step"] for r in run} & {r["step"] for r in baseline}
    either = {r["step"] for r in run} | {r["step"] for r in baseline}
    steps = [step for step, value in ours.items() if theirs.get(step)]
    a, b = (smoothed([values[step] for step in steps], smooth) for values in (ours, theirs))
    relative = [(x - y) / y for x, y in zip(a, b, strict=True)]
    return Gap(steps, relative, len(either - both), len(both) - len(steps))
