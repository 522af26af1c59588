"""Which conversations share a sequence, and micro-batches of them whose losses make a step's loss a
mean over tokens.

DeepSpeed divides the gradients of a step's micro-batches by their number, and averages over
data-parallel ranks. A step of N trained tokens, in A micro-batches on each of D ranks, has the mean
over its tokens where each micro-batch gives the sum of its losses over N / (A D): ``loss_tokens``.
All ranks compute the same plan, and so N, by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
import torch

from launch.chat.store import Conversations

__all__ = ["Sequences", "micro_batches", "pack"]

_MULTIPLE = 64
"""Padded micro-batches have a multiple of so many tokens a row: few different shapes, and whole
tiles of kernels.
"""


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best fit, longest first: every item into the fullest sequence that still has room for it.

    No length is above ``capacity``; of equal ones the earlier comes first. Returns the items of
    each sequence.
    """
    sequences: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> sequences
    rooms: list[int] = []  # keys of with_room that have sequences, ascending
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
            sequences[chosen].append(item)
        else:
            room, chosen = capacity, len(sequences)
            sequences.append([item])
        if left := room - length:
            if not with_room.setdefault(left, []):
                insort(rooms, left)
            with_room[left].append(chosen)
    return sequences


class Sequences:
    """Sequences at positions 0, 1, 2, ... of a run: each epoch holds every conversation once, in an
    order of its own.

    Args:
        conversations: all of them.
        chosen: numbers of the conversations to use.
        capacity: tokens of a sequence.
        packed: several conversations a sequence; else one.
        seed: of the orders; None = as they are, in every epoch.
        epochs: sequences beyond these are empty; None = without end.
    """

    def __init__(
        self,
        conversations: Conversations,
        chosen: np.ndarray,
        *,
        capacity: int,
        packed: bool = True,
        seed: int | None = None,
        epochs: float | None = None,
    ) -> None:
        self.conversations, self._chosen = conversations, chosen
        self.capacity, self.packed, self._seed = capacity, packed, seed
        self._plans: dict[int, list[list[int]]] = {}
        """Of the last two epochs: a step may reach from one into the next."""
        # As many in every epoch: best fit depends on the lengths, not on which of equal ones comes
        # first.
        self.per_epoch = len(self._of(0))
        self.end = None if epochs is None else int(np.ceil(epochs * self.per_epoch - 1e-9))

    def __getitem__(self, position: int) -> list[int]:
        """Numbers of the conversations in the sequence at a position."""
        if self.end is not None and position >= self.end:
            return []
        epoch, place = divmod(position, self.per_epoch)
        return self._of(epoch)[place]

    def trained(self, start: int, stop: int) -> int:
        """Trained tokens of the sequences from ``start`` up to ``stop``."""
        return self._sum(self.conversations.trained, start, stop)

    def tokens(self, start: int, stop: int) -> int:
        """Tokens of the conversations of the sequences from ``start`` up to ``stop``, without
        padding.
        """
        return self._sum(self.conversations.lengths, start, stop)

    def describe(self, name: str) -> str:
        """Content of the first epoch, or of a part of it where there is no more."""
        count = self.per_epoch if self.end is None else min(self.per_epoch, self.end)
        conversations = sum(len(self[place]) for place in range(count))
        return (
            f"{name}: {conversations:,} conversations in {count:,} sequences of {self.capacity} "
            "tokens, "
            f"{100 * self.tokens(0, count) / (count * self.capacity):.1f} % full"
        )

    def _sum(self, counts: np.ndarray, start: int, stop: int) -> int:
        return sum(
            int(counts[number]) for position in range(start, stop) for number in self[position]
        )

    def _of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._plans:
            order = self._chosen
            generator = None if self._seed is None else np.random.default_rng((self._seed, epoch))
            if generator is not None:
                order = generator.permutation(order)
            if self.packed:
                plan = [
                    order[inside].tolist()
                    for inside in pack(self.conversations.lengths[order], self.capacity)
                ]
            else:
                plan = [[int(number)] for number in order]
            if generator is not None:
                plan = [plan[place] for place in generator.permutation(len(plan))]
            self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}
        return self._plans[epoch]


def micro_batches(
    sequences: Sequences,
    *,
    micro: int,
    accumulation: int,
    dp_rank: int,
    dp_size: int,
    pad: int,
    consumed: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro-batches of one rank, after ``consumed`` sequences of all ranks.

    A sequence goes to the rank that :class:`launch.data.sampler.PretrainSampler` would give it to.
    A step has ``accumulation`` micro-batches of ``micro`` sequences: in one row with the borders of
    conversations where they are packed, else one a row, padded with ``pad`` to the longest.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` fp32, packed ``[1, micro *
        capacity]`` with ``cu_seqlens`` int32 ``[segments + 1]``, else ``[micro, longest]``;
        ``loss_tokens`` fp64 ``[]``, on the CPU.
    """
    total = micro * accumulation * dp_size  # sequences of a step on all ranks
    position = consumed
    while True:
        trained = sequences.trained(position, position + total)
        divisor = torch.tensor(max(trained, 1) / (accumulation * dp_size), dtype=torch.float64)
        for index in range(accumulation):
            first = position + (index * dp_size + dp_rank) * micro
            rows = [sequences[first + row] for row in range(micro)]
            batch = {k: torch.from_numpy(v) for k, v in _micro_batch(sequences, rows, pad).items()}
            if torch.cuda.is_available():
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield {**batch, "loss_tokens": divisor}
        position += total


def _micro_batch(sequences: Sequences, rows: list[list[int]], pad: int) -> dict[str, np.ndarray]:
    conversations, packed, length = sequences.conversations, sequences.packed, sequences.capacity
    if not packed:
        longest = max(
            (int(conversations.lengths[n]) for numbers in rows for n in numbers), default=1
        )
        length = min(-(-longest // _MULTIPLE) * _MULTIPLE, length)
    size, borders = len(rows) * length, [0]
    tokens, labels = np.full(size, pad, np.int64), np.full(size, pad, np.int64)
    positions, mask = np.tile(np.arange(length), len(rows)), np.zeros(size, np.float32)
    for place, numbers in enumerate(rows):
        begin, stop = place * length, (place + 1) * length
        for number in numbers:
            ids, learnt = conversations[number]
            end = begin + len(ids)
            tokens[begin:end], positions[begin:end] = ids, np.arange(len(ids))
            # The last token predicts nothing.
            labels[begin : end - 1], mask[begin : end - 1] = ids[1:], learnt[1:]
            borders.append(end)
            begin = end
        if packed and begin < stop:  # padding is a document of its own
            positions[begin:stop] = np.arange(stop - begin)
            borders.append(stop)
    flat: dict[str, np.ndarray] = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": positions,
        "loss_mask": mask,
    }
    made = {name: array.reshape(1 if packed else len(rows), -1) for name, array in flat.items()}
    return {**made, "cu_seqlens": np.asarray(borders, np.int32)} if packed else made
