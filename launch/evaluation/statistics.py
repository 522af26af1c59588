"""Means, their standard errors, and differences of two evaluations of the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["mean", "mean_error", "ratio", "ratio_error"]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; the sum is exact, so that it does not depend on the order."""
    return math.fsum(values) / len(values)


def mean_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean: the sample's standard deviation (n - 1) over sqrt(n); None for one value."""
    n = len(values)
    if n < 2:
        return None
    center = mean(values)
    return math.sqrt(math.fsum((v - center) ** 2 for v in values) / (n - 1) / n)


def ratio(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Sum over count: the mean per token of rows with ``counts`` tokens each."""
    return math.fsum(sums) / sum(counts)


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Standard error of :func:`ratio` with rows as independent units (the usual ratio estimator); None for one row."""
    n = len(sums)
    if n < 2:
        return None
    center = ratio(sums, counts)
    spread = math.fsum((s - center * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return math.sqrt(spread * n / (n - 1)) / sum(counts)
