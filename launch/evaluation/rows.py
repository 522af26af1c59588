"""Rows of tokens, and the losses of their last ones, spread over data-parallel ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from coat_dist.ranks import gather, rank_and_world
from launch.evaluation.model import Losses
from launch.log_level import shows

__all__ = ["Row", "batches", "digest", "score", "score_batch", "sliding_windows"]


@dataclass(frozen=True)
class Row:
    """Tokens that one forward pass sees together."""

    ids: np.ndarray
    """Integers ``[n]``, n at least 2. The model reads all but the last and predicts all but the
    first.
    """
    scored: int
    """How many of the last tokens count: 1 to n - 1."""


def sliding_windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a document of ``length`` tokens, as in transformers' page on the perplexity of
    fixed-length models.

    Windows of ``window`` (2 or more) tokens begin every ``stride`` (1 to ``window``) tokens, and
    each scores the tokens that the one before had not reached. The first token of a window has
    nothing before it and is never scored: with ``stride < window`` that is the document's first
    alone.

    Yields:
        ``(begin, end, scored)``: the window is ``[begin, end)``, its last ``scored`` tokens count,
            1 or more.
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
    """Indices of rows in batches of at most ``size``, longest first, so that what does not fit
    fails at once.

    The same batches for any number of ranks: in FP8 a row's result may depend on the rows beside
    it.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i))
    return [order[at : at + size] for at in range(0, len(order), size)]


def digest(rows: Sequence[Row]) -> str:
    """Hex digest of what is scored: two evaluations can be compared row by row where it is the
    same.
    """
    total = hashlib.sha256()
    for row in rows:
        total.update(b"%d,%d:" % (len(row.ids), row.scored))
        total.update(np.ascontiguousarray(row.ids, np.int64).data)
    return total.hexdigest()


def score_batch(losses: Losses, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Losses of the scored tokens of each row, fp64 ``[scored]`` on the CPU.

    Rows are padded on the right with their last token, which no causal layer lets the others see.
    """
    longest = max(len(row.ids) for row in rows)
    padded = torch.from_numpy(
        np.stack(
            [np.pad(np.asarray(r.ids, np.int64), (0, longest - len(r.ids)), "edge") for r in rows]
        )
    )
    values = losses(padded[:, :-1].contiguous(), padded[:, 1:].contiguous()).double().cpu()
    return [
        v[len(row.ids) - 1 - row.scored : len(row.ids) - 1]
        for v, row in zip(values, rows, strict=True)
    ]


def score(
    losses: Losses, rows: Sequence[Row], batch_size: int, what: str, tp: int = 1
) -> list[float]:
    """Sum of the losses of each row's scored tokens, in nats; collective.

    Batches are dealt out to the data-parallel ranks. Each row's sum is taken in fp64 by the rank
    that has it, and all ranks get all of them, in order: the result does not depend on the number
    of ranks.
    """
    rank, world = rank_and_world()
    mine = batches(rows, batch_size)[rank // tp :: world // tp]
    silent = rank or os.environ.get("RANK", "0") != "0" or not shows("info")
    hidden = True if silent else None  # None: shown on a terminal
    sums: dict[int, float] = {}
    for batch in tqdm(
        mine, desc=what, unit="batch", disable=hidden, dynamic_ncols=True, leave=False
    ):
        scored = score_batch(losses, [rows[i] for i in batch])
        sums |= {i: float(one.sum()) for i, one in zip(batch, scored, strict=True)}
    found = {i: value for part in gather(sums) for i, value in part.items()}
    return [found[i] for i in range(len(rows))]
