"""Which conversations share a sequence, epoch by epoch. Deterministic: all ranks make the same plan and tell nobody."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

__all__ = ["Sequences", "pack"]


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Best fit, longest first: every item into the fullest sequence that still has room for it.

    Args:
        lengths: tokens of each item, none above ``capacity``. Of equal ones the earlier comes first.

    Returns:
        The numbers of the items of each sequence, in the order they came in.
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
    """Sequences at positions 0, 1, 2, ... of a run: each epoch holds every conversation once, in an order of its own.

    Args:
        lengths: tokens of each conversation.
        trained: trained tokens of each.
        chosen: numbers of the conversations to use.
        capacity: tokens of a sequence.
        packed: several conversations a sequence; else one.
        seed: of the orders; None = as they are, in every epoch.
        epochs: sequences beyond these are empty; None = without end.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        trained: np.ndarray,
        chosen: np.ndarray,
        *,
        capacity: int,
        packed: bool = True,
        seed: int | None = None,
        epochs: float | None = None,
    ) -> None:
        self._lengths, self._trained, self._chosen = lengths, trained, chosen
        self._capacity, self._packed, self._seed = capacity, packed, seed
        self._plans: dict[int, list[list[int]]] = {}
        """Of the last two epochs: a step may reach from one into the next."""
        # As many in every epoch: best fit depends on the lengths, not on which of equal ones comes first.
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
        return self._sum(self._trained, start, stop)

    def tokens(self, start: int, stop: int) -> int:
        """Tokens of the conversations of the sequences from ``start`` up to ``stop``; padding is none."""
        return self._sum(self._lengths, start, stop)

    def _sum(self, counts: np.ndarray, start: int, stop: int) -> int:
        return sum(int(counts[number]) for position in range(start, stop) for number in self[position])

    def _of(self, epoch: int) -> list[list[int]]:
        if epoch not in self._plans:
            order = self._chosen
            generator = None if self._seed is None else np.random.default_rng((self._seed, epoch))
            if generator is not None:
                order = generator.permutation(order)
            if self._packed:
                plan = [order[inside].tolist() for inside in pack(self._lengths[order], self._capacity)]
            else:
                plan = [[int(number)] for number in order]
            if generator is not None:
                plan = [plan[place] for place in generator.permutation(len(plan))]
            self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}
        return self._plans[epoch]
