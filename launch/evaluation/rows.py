"""What a model is asked: rows of tokens of which the last ones are scored, and the batches they make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Row", "batches", "digest", "distinct", "sliding_windows"]


@dataclass(frozen=True)
class Row:
    """Tokens that one forward pass sees together."""

    ids: np.ndarray
    """Integers ``[n]``, n at least 2. The model reads all but the last and predicts all but the first."""
    scored: int
    """How many of the last tokens count: 1 to n - 1."""


def sliding_windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a document, each token scored once and with as much context as the recipe gives it.

    It is the recipe of transformers' page on the perplexity of fixed-length models: windows of ``window`` tokens begin
    every ``stride`` tokens, and each scores the tokens that the one before had not reached. The first token of a
    window has nothing before it and is never scored: with ``stride < window`` that is the document's first alone.

    Args:
        length: tokens of the document.
        window: tokens that the model sees together, 2 or more.
        stride: 1 to ``window``.

    Yields:
        ``(begin, end, scored)``: the window is ``[begin, end)``, its last ``scored`` tokens count, 1 or more.
    """
    reached = 0
    for begin in range(0, length, stride):
        end = min(begin + window, length)
        scored = min(end - reached, end - begin - 1)
        if scored > 0:
            yield begin, end, scored
        reached = end
        if end == length:
            return


def batches(rows: Sequence[Row], size: int) -> list[list[int]]:
    """Indices of rows in batches of at most ``size``, longest first, so that what does not fit fails at once.

    The same batches for any number of ranks: in FP8 a row's result may depend on the rows beside it.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i))
    return [order[at : at + size] for at in range(0, len(order), size)]


def distinct(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Rows without repetitions, and for each of ``rows`` the index of its like among them.

    Two equal rows in two batches may differ by a rounding, so that of two equal choices either could win.
    """
    found: dict[tuple[bytes, int], int] = {}
    index = [found.setdefault((row.ids.tobytes(), row.scored), len(found)) for row in rows]
    at = dict(zip(reversed(index), reversed(rows), strict=True))
    return [at[i] for i in range(len(found))], index


def digest(rows: Sequence[Row]) -> str:
    """Hex digest of what is scored: two evaluations can be compared row by row where it is the same."""
    total = hashlib.sha256()
    for row in rows:
        total.update(b"%d,%d:" % (len(row.ids), row.scored))
        total.update(np.ascontiguousarray(row.ids, np.int64).data)
    return total.hexdigest()
