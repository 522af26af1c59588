"""How long steps take on more ranks: a few factors, found from steps that were measured on fewer.

    seconds = micro-batches * slowdown * F + U / share + K * communication

F is a micro-batch's computing, U the update, which ZeRO shares over data-parallel ranks (or, where that describes the
measurements better, does not), and ``communication`` what the fits of the collectives say that data parallelism takes
if nothing hides it; K is the part of it that shows. ``slowdown`` is 1 on GPUs; of CPU ranks it says how many share a
core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import log

import numpy as np

from .fit import solve, student
from .links import Range

__all__ = ["Cost", "Point", "StepFit", "fit_steps", "spread_of"]

_LEAST = 0.03
"""Relative error below which no prediction is believed."""
_SHOWS = (0.5, 0.0, 1.0)
"""Part of communication that shows, where measurements say nothing of it; the middle one first."""


@dataclass(frozen=True)
class Cost:
    """What is known of a step before it is measured."""

    share: float
    """Ranks that share the update."""
    communication: Range
    """Seconds, if nothing hides it."""
    slowdown: Range = Range(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Point:
    """Steps that were measured."""

    ranks: int
    accumulation: int
    seconds: float
    """The median."""
    spread: float
    """Relative standard deviation of one step."""
    steps: int


def spread_of(seconds: Sequence[float]) -> float:
    """Relative standard deviation, from the middle of the steps: one that was disturbed does not count."""
    ordered = np.sort(np.asarray(seconds, dtype=float))
    quarters = np.quantile(ordered, [0.25, 0.75])
    return float((quarters[1] - quarters[0]) / 1.349 / np.median(ordered))


@dataclass(frozen=True)
class _One:
    shared: bool
    factors: np.ndarray
    covariance: np.ndarray
    scatter: float


@dataclass(frozen=True)
class StepFit:
    """Factors, and every description that fits as well."""

    fits: tuple[_One, ...]
    cost: Callable[[int, int], Cost]
    spread: float
    """Of one step."""
    largest: int
    t: float

    @property
    def micro(self) -> float:
        """F, seconds."""
        return float(self.fits[0].factors[0])

    @property
    def update(self) -> float:
        """U, seconds."""
        return float(self.fits[0].factors[1])

    @property
    def shows(self) -> float:
        """K."""
        return float(self.fits[0].factors[2])

    @property
    def shows_error(self) -> float:
        """Half of a 95 % interval of K; 0 where steps say nothing of it."""
        best = self.fits[0]
        return self.t * best.scatter * float(np.sqrt(best.covariance[2, 2]))

    def seconds(self, ranks: int, accumulation: int) -> Range:
        """Of a step on ``ranks`` ranks: a 95 % range.

        It has the scatter of the measurements, that of the factors, the range of the collectives, and what waiting for
        the slowest of more ranks may add: the expected largest of n normal errors.
        """
        cost = self.cost(ranks, accumulation)
        found = [self._seconds(one, cost, ranks, accumulation) for one in self.fits]
        return Range(min(one.low for one in found), found[0].middle, max(one.high for one in found))

    def _seconds(self, one: _One, cost: Cost, ranks: int, accumulation: int) -> Range:
        def row(part: str) -> np.ndarray:
            slow, sent = getattr(cost.slowdown, part), getattr(cost.communication, part)
            return np.array([accumulation * slow, 1 / cost.share if one.shared else 1.0, sent])

        middle = float(row("middle") @ one.factors)
        lever = row("middle") @ one.covariance @ row("middle") / middle**2
        error = self.t * one.scatter * float(np.sqrt(1 + lever))
        waiting = self.spread * (np.sqrt(2 * log(max(ranks, 1))) - np.sqrt(2 * log(max(self.largest, 1))))
        low, high = float(row("low") @ one.factors), float(row("high") @ one.factors)
        return Range(low / np.exp(error), middle, high * float(np.exp(error)) * (1 + max(0.0, float(waiting))))


def fit_steps(points: Sequence[Point], cost: Callable[[int, int], Cost]) -> StepFit:
    """The factors.

    Args:
        cost: of so many ranks and micro-batches.

    Raises:
        ValueError: nothing was measured.
    """
    if not points:
        raise ValueError("points: got none, accepted: steps of one size or more")
    seconds = np.array([p.seconds for p in points])
    spread = float(np.median([p.spread for p in points]))
    # Of a median of n steps, the error is 1.25 / sqrt(n) of one's.
    noise = float(np.mean([1.25 * p.spread / np.sqrt(p.steps) for p in points]))
    costs = [cost(p.ranks, p.accumulation) for p in points]
    sent = np.array([one.communication.middle for one in costs])
    # One number of ranks cannot tell communication from the rest: half of it, none or all of it may show.
    shown = (None,) if len({p.ranks for p in points}) > 1 else _SHOWS
    found = []
    for shows, shared in product(shown, (True, False)):
        rows = [
            [p.accumulation * one.slowdown.middle, 1 / one.share if shared else 1.0]
            for p, one in zip(points, costs, strict=True)
        ]
        columns, target = np.array(rows), seconds
        if shows is None:
            columns = np.column_stack([columns, sent])
        else:
            target = seconds - shows * sent
        factors, covariance, squares = solve(columns / seconds[:, None], target / seconds)
        freedom = len(points) - int((factors > 0).sum())
        scatter = max(_LEAST, noise, float(np.sqrt(squares / max(freedom, 1))))
        if shows is not None:
            factors, covariance = np.append(factors, shows), np.pad(covariance, (0, 1))
        found.append(_One(shared, factors, covariance, scatter))
    found.sort(key=lambda one: one.scatter)  # shared first where both are as good
    near = tuple(one for one in found if one.scatter <= 1.5 * found[0].scatter)
    freedom = sum(p.steps - 1 for p in points)
    return StepFit(near, cost, spread, max(p.ranks for p in points), student(freedom))
