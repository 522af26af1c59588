"""Errors of gradients over many batches, split into what an average keeps and what it removes.

With d the difference of a gradient to its reference for one batch, the **bias** is |E d| and the **noise** is
sqrt(E |d - E d|^2). Of n batches, ``|mean d|^2`` is too large by noise^2 / n, so squares come from pairs of different
batches: ``(|sum d|^2 - sum |d|^2) / (n (n - 1))`` is the bias squared without a bias of its own, and below zero about
half of the time where there is none. Its standard error is a jackknife over blocks of batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Estimate", "Totals", "estimate"]

Kinds = dict[str, slice]


class Totals:
    """Sums over the batches of each block, for one series of vectors ``[n]`` that is cut into kinds."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.sums: list[torch.Tensor] = []
        """Of each block, on the CPU: the device holds one block at a time."""
        self.squares: list[dict[str, float]] = []
        self.products: list[dict[str, float]] = []
        """With the exact gradient of the same batch."""
        self._open: list[torch.Tensor] = []

    def add(self, vector: torch.Tensor, exact: torch.Tensor) -> None:
        """One batch."""
        if not self._open:
            self._open = [vector.clone(), *(vector.new_zeros(len(self.kinds), dtype=torch.float64) for _ in range(2))]
        else:
            self._open[0] += vector
        for i, part in enumerate(self.kinds.values()):
            self._open[1][i] += _dot(vector[part], vector[part])
            self._open[2][i] += _dot(vector[part], exact[part])

    def close_block(self) -> None:
        """The next batch begins another block, of as many batches."""
        total, squares, products = self._open
        self.sums.append(total.cpu())
        self.squares.append(dict(zip(self.kinds, squares.tolist(), strict=True)))
        self.products.append(dict(zip(self.kinds, products.tolist(), strict=True)))
        self._open = []


class Estimate(NamedTuple):
    """Of one kind of weights. Squares of norms, unbiased, may be negative; errors are standard errors."""

    bias2: float
    bias2_error: float
    noise2: float
    gain: float
    """Part of the bias along the mean exact gradient, relative to it: -0.01 is a gradient that is 1 % too short."""
    gain_error: float
    mean2: float
    """|E g|^2 of the exact gradient g."""
    spread2: float
    """E |g - E g|^2 of the exact gradient: the noise that batches have by themselves."""


def estimate(found: Totals, exact: Totals, kind: str, batches: int) -> Estimate:
    """Bias and noise of ``found``, differences to a reference, over blocks of ``batches`` batches.

    Raises:
        ValueError: fewer than two blocks.
    """
    if len(found.sums) < 2:
        raise ValueError(f"blocks of batches: got {len(found.sums)}, accepted: at least 2")
    part = found.kinds[kind]
    d, g = (torch.stack([s[part] for s in t.sums]).double() for t in (found, exact))
    dd, dg, gg = d @ d.t(), d @ g.t(), g @ g.t()
    d2, g2, product = (
        torch.tensor([row[kind] for row in rows], dtype=torch.float64)
        for rows in (found.squares, exact.squares, found.products)
    )

    def values(keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = batches * keep.numel()
        pairs = n * (n - 1)
        (dd_, dg_, gg_), (d2_, g2_, p_) = (
            [m[keep][:, keep].sum() for m in (dd, dg, gg)],
            [v[keep].sum() for v in (d2, g2, product)],
        )
        bias2, mean2 = (dd_ - d2_) / pairs, (gg_ - g2_) / pairs
        return bias2, (d2_ - dd_ / n) / (n - 1), (dg_ - p_) / pairs / mean2, mean2, (g2_ - gg_ / n) / (n - 1)

    blocks = torch.arange(len(found.sums))
    bias2, noise2, gain, mean2, spread2 = (v.item() for v in values(blocks))
    left_out = [values(blocks[blocks != k]) for k in blocks]
    bias2_error, gain_error = (_jackknife(torch.stack([v[i] for v in left_out])) for i in (0, 2))
    return Estimate(bias2, bias2_error, noise2, gain, gain_error, mean2, spread2)


def _jackknife(values: torch.Tensor) -> float:
    return ((len(values) - 1) / len(values) * (values - values.mean()).square().sum()).sqrt().item()


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (
        (a.double() * b.double()).sum()
        if a.numel() <= 2**24
        else sum(  # type: ignore[return-value]
            _dot(x, y) for x, y in zip(a.split(2**24), b.split(2**24), strict=True)
        )
    )
