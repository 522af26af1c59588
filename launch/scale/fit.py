"""Latency, bandwidth and overlap of collectives from measurements, each with how well it is known.

Least squares of relative errors, as the times of a few bytes and of a GiB count alike. Ranges are 95 % intervals of one
further measurement (Student's t, so that few measurements make a wide range), over every shape of latency's growth
(:data:`launch.scale.links.SHAPES`) that describes the measurements: those of two ranks fit all of them, and a
prediction for 64 ranks then says so by its width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .links import SHAPES, Link, Range, hops, share, usual_shape

__all__ = ["Fit", "Overlap", "Sample", "fit", "fit_overlap", "solve", "student"]

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_LEAST = 0.02
"""Relative scatter below which a fit is not believed: few measurements may lie on a line by chance."""


@dataclass(frozen=True)
class Sample:
    """One collective, measured."""

    kind: str
    ranks: int
    size: float
    """Bytes, as :mod:`launch.scale.links` counts them."""
    seconds: float


def student(freedom: int) -> float:
    """Student's t of a two-sided 95 % interval."""
    return _T[freedom - 1] if 1 <= freedom <= len(_T) else 1.96 + 2.6 / freedom if freedom > 0 else _T[0]


def solve(columns: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Least squares with no negative factor, by trying every set of columns.

    Args:
        columns: ``[samples, factors]``, few factors.
        target: ``[samples]``.

    Returns:
        The factors; their covariance for errors of variance 1, 0 where a factor is left out; the sum of squares.
    """
    count = columns.shape[1]
    best: tuple[float, np.ndarray, list[int]] | None = None
    for size in range(count + 1):
        for chosen in map(list, combinations(range(count), size)):
            part = columns[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            if (found < 0).any():
                continue
            squares = float(((target - part @ found) ** 2).sum())
            if best is None or squares < best[0] * (1 - 1e-9):
                best = squares, found, chosen
    assert best is not None  # no columns at all are a solution
    factors, covariance = np.zeros(count), np.zeros((count, count))
    chosen = best[2]
    factors[chosen] = best[1]
    part = columns[:, chosen]
    covariance[np.ix_(chosen, chosen)] = np.linalg.pinv(part.T @ part)
    return factors, covariance, best[0]


@dataclass(frozen=True)
class _One:
    """A fit of one shape."""

    shape: str
    latency: float
    per_byte: float
    covariance: np.ndarray
    scatter: float
    """Relative, of one measurement."""
    t: float

    def seconds(self, kind: str, ranks: int, size: float) -> Range:
        row = np.array([hops(kind, ranks, self.shape), size * share(kind, ranks)])
        middle = float(row @ [self.latency, self.per_byte])
        if not middle:
            return Range(0.0, 0.0, 0.0)
        spread = self.t * self.scatter * float(np.sqrt(1 + row @ self.covariance @ row / middle**2))
        # A factor, not a term: times are positive, and twice as slow is as likely as twice as fast.
        return Range(middle / np.exp(spread), middle, middle * np.exp(spread))


@dataclass(frozen=True)
class Fit:
    """Of one kind of collective over one link."""

    kind: str
    fits: tuple[_One, ...]
    """The best one first, then others that describe the measurements as well."""
    ranks: tuple[int, ...]
    """That were measured."""
    samples: int

    @property
    def best(self) -> _One:
        return self.fits[0]

    @property
    def shape(self) -> str:
        return self.best.shape

    @property
    def latency(self) -> float:
        """Seconds of a hop."""
        return self.best.latency

    @property
    def bandwidth(self) -> float:
        """Bytes a second of each rank in one direction."""
        return 1 / self.best.per_byte if self.best.per_byte else float("inf")

    @property
    def latency_error(self) -> float:
        """Half of its 95 % interval, seconds."""
        return self.best.t * self.best.scatter * float(np.sqrt(self.best.covariance[0, 0]))

    @property
    def bandwidth_error(self) -> float:
        """Half of its 95 % interval, bytes a second."""
        error = self.best.t * self.best.scatter * float(np.sqrt(self.best.covariance[1, 1]))
        return error * self.bandwidth**2 if self.best.per_byte else float("inf")

    def seconds(self, ranks: int, size: float) -> Range:
        """What a collective takes."""
        found = [one.seconds(self.kind, ranks, size) for one in self.fits]
        return Range(min(one.low for one in found), found[0].middle, max(one.high for one in found))

    def link(self, name: str) -> Link:
        return Link(name, self.bandwidth, self.latency)


def fit(samples: Iterable[Sample]) -> Fit:
    """Latency and bandwidth of measurements of one kind.

    Raises:
        ValueError: less than two measurements of two ranks or more, or several kinds.
    """
    taken = [one for one in samples if one.ranks > 1 and one.seconds > 0]
    kinds = {one.kind for one in taken}
    if len(taken) < 2 or len(kinds) != 1:
        raise ValueError(f"samples: got {len(taken)} of {sorted(kinds)}, accepted: two or more of one kind")
    kind = kinds.pop()
    seconds = np.array([one.seconds for one in taken])
    found = []
    for shape in SHAPES:
        columns = np.array([[hops(kind, s.ranks, shape), s.size * share(kind, s.ranks)] for s in taken])
        factors, covariance, squares = solve(columns / seconds[:, None], np.ones(len(taken)))
        freedom = len(taken) - max(1, int((factors > 0).sum()))
        scatter = max(float(np.sqrt(squares / max(freedom, 1))), _LEAST)
        found.append(_One(shape, float(factors[0]), float(factors[1]), covariance, scatter, student(freedom)))
    least = min(one.scatter for one in found)
    usual = usual_shape(kind)
    # Where measurements cannot tell (two ranks only), the shape that is usual comes first.
    found.sort(key=lambda one: (one.scatter > 1.1 * least, one.shape != usual, SHAPES.index(one.shape)))
    near = [one for one in found if one.scatter <= 1.5 * least]
    return Fit(kind, tuple(near), tuple(sorted({one.ranks for one in taken})), len(taken))


@dataclass(frozen=True)
class Overlap:
    """What is hidden when computing and a collective run at once: a part of the shorter one, less a constant."""

    part: float
    """0 = one after the other, 1 = all of it is hidden."""
    error: float
    """Half of its 95 % interval."""
    lost: float
    """Seconds of each collective that are lost to starting one beside the other and waiting for it."""


def fit_overlap(alone: Sequence[tuple[float, float]], together: Sequence[float]) -> Overlap:
    """What collectives hide behind computing.

    Args:
        alone: seconds of computing and of the collective, each by itself.
        together: seconds of both at once.
    """
    shorter = np.array([min(pair) for pair in alone])
    hidden = np.array([sum(pair) - both for pair, both in zip(alone, together, strict=True)])
    columns = np.stack([np.ones_like(shorter), -1 / shorter], axis=1)  # each pair counts alike, whatever its size
    factors, covariance, squares = solve(columns, hidden / shorter)
    freedom = len(shorter) - max(1, int((factors > 0).sum()))
    scatter = max(float(np.sqrt(squares / max(freedom, 1))), _LEAST)
    error = student(freedom) * scatter * float(np.sqrt(covariance[0, 0]))
    return Overlap(float(np.clip(factors[0], 0.0, 1.0)), min(error or 1.0, 1.0), float(factors[1]))
