"""Errors of gradients over many batches, split into what an average keeps and what it removes.

With d the difference of a gradient to its reference for one batch, the **bias** is |E d| and the **noise** is
sqrt(E |d - E d|^2). Of n batches, ``|mean d|^2`` is too large by noise^2 / n, so squares come from pairs of different
batches: ``(|sum d|^2 - sum |d|^2) / (n (n - 1))`` is the bias squared without a bias of its own, and below zero about
half of the time where there is none. Its standard error is a jackknife over blocks of batches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Estimate", "Totals", "estimates"]

_CHUNK = 2**22
"""Elements of a vector in fp64 at a time: 32 MiB."""


class Totals:
    """Sums over the batches of each block, for one series of vectors ``[n]`` that is cut into kinds."""

    def __init__(self, kinds: dict[str, slice]) -> None:
        """``kinds``: parts of the vectors, none twice."""
        self.kinds = kinds
        self.sums: list[torch.Tensor] = []
        """Of each block, on the CPU: the device holds one block at a time."""
        self.squares: list[torch.Tensor] = []
        """Of each block: the sum of the batches' squares, fp64 ``[kinds]``."""
        self.products: list[torch.Tensor] = []
        """The same of products with the exact gradient of the same batch."""
        self._open: list[torch.Tensor] = []

    def add(self, vector: torch.Tensor, exact: torch.Tensor) -> None:
        """One batch."""
        found = [
            torch.stack([_dot(vector[part], other[part]) for part in self.kinds.values()]) for other in (vector, exact)
        ]
        if self._open:
            for total, one in zip(self._open, (vector, *found), strict=True):
                total += one
        else:
            self._open = [vector.clone(), *found]

    def close_block(self) -> None:
        """The next batch begins another block, of as many batches."""
        for kept, total in zip((self.sums, self.squares, self.products), self._open, strict=True):
            kept.append(total.cpu())
        self._open = []

    def grams(self, other: Totals, device: torch.device | str = "cpu") -> torch.Tensor:
        """Inner products of the blocks' sums with ``other``'s, fp64 ``[kinds, blocks, blocks]``."""
        found = []
        for part in self.kinds.values():
            gram = torch.zeros(len(self.sums), len(other.sums), dtype=torch.float64)
            for first in range(part.start, part.stop, _CHUNK):
                chunk = slice(first, min(first + _CHUNK, part.stop))
                a, b = (torch.stack([s[chunk].to(device) for s in t.sums]).double() for t in (self, other))
                gram += (a @ b.t()).cpu()
            found.append(gram)
        return torch.stack(found)


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


def estimates(
    found: Totals, exact: Totals, batches: int, device: torch.device | str = "cpu", gg: torch.Tensor | None = None
) -> dict[str, Estimate]:
    """Bias and noise of ``found``, differences to a reference, over blocks of ``batches`` batches: by kind, and "all".

    Args:
        device: where to multiply.
        gg: ``exact.grams(exact)``, where it is known.

    Raises:
        ValueError: fewer than two blocks.
    """
    if len(found.sums) < 2:
        raise ValueError(f"blocks of batches: got {len(found.sums)}, accepted: at least 2")
    grams = found.grams(found, device), found.grams(exact, device), exact.grams(exact, device) if gg is None else gg
    squares = [torch.stack(rows, 1) for rows in (found.squares, found.products, exact.squares)]
    result = {
        kind: _estimate([g[i] for g in grams], [s[i] for s in squares], batches) for i, kind in enumerate(found.kinds)
    }
    result["all"] = _estimate([g.sum(0) for g in grams], [s.sum(0) for s in squares], batches)
    return result


def _estimate(grams: list[torch.Tensor], squares: list[torch.Tensor], batches: int) -> Estimate:
    """From inner products of blocks' sums ``[blocks, blocks]`` and sums of batches' own ``[blocks]``, each of the
    differences, of differences and exact gradients, and of exact gradients."""

    def values(keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = batches * keep.numel()
        sums, own = [g[keep][:, keep].sum() for g in grams], [s[keep].sum() for s in squares]
        bias2, product, mean2 = ((s - o) / (n * (n - 1)) for s, o in zip(sums, own, strict=True))
        noise2, spread2 = ((own[i] - sums[i] / n) / (n - 1) for i in (0, 2))
        return bias2, noise2, product / mean2, mean2, spread2

    blocks = torch.arange(grams[0].shape[0])
    bias2, noise2, gain, mean2, spread2 = (v.item() for v in values(blocks))
    left_out = [values(blocks[blocks != k]) for k in blocks]
    bias2_error, gain_error = (_jackknife(torch.stack([v[i] for v in left_out])) for i in (0, 2))
    return Estimate(bias2, bias2_error, noise2, gain, gain_error, mean2, spread2)


def _jackknife(values: torch.Tensor) -> float:
    return ((len(values) - 1) / len(values) * (values - values.mean()).square().sum()).sqrt().item()


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Inner product, summed in fp64."""
    parts = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return torch.stack([(x.double() * y.double()).sum() for x, y in parts]).sum()
