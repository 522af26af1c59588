"""Micro-batches of conversations, each with what its loss is divided by: so that a step's loss is a mean over tokens.

DeepSpeed divides the gradients of a step's micro-batches by their number, and averages over data-parallel ranks. A
step of N trained tokens, in A micro-batches on each of D ranks, has the mean over its tokens where each micro-batch
gives the sum of its losses over N / (A D): ``loss_tokens``. Every rank knows N from the plan, without asking others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from launch.chat.packing import Sequences
from launch.chat.store import Conversations

__all__ = ["Layout", "micro_batches"]

_MULTIPLE = 64
"""Padded micro-batches have a multiple of so many tokens a row: few different shapes, and whole tiles of kernels."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How sequences become the micro-batches of one rank."""

    micro: int
    """Sequences of a micro-batch."""
    accumulation: int
    """Micro-batches of a step."""
    dp_rank: int
    dp_size: int
    seq_length: int
    packed: bool
    """All sequences of a micro-batch in one row, ``[1, micro * seq_length]``, with the borders of conversations;
    else one conversation a row, padded to the longest."""
    pad: int
    """Id of padding; never trained, never looked at by other tokens."""

    @property
    def total(self) -> int:
        """Sequences of a step on all ranks."""
        return self.micro * self.accumulation * self.dp_size


def micro_batches(
    conversations: Conversations, sequences: Sequences, layout: Layout, consumed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro-batches of one rank, after ``consumed`` sequences of all ranks.

    A sequence goes to the rank that :class:`launch.data.sampler.PretrainSampler` would give it to.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` fp32, packed ``[1, micro * seq_length]`` with
        ``cu_seqlens`` int32 ``[segments + 1]``, else ``[micro, longest]``; ``loss_tokens`` fp64 ``[]``, on the CPU.
    """
    pinned = torch.cuda.is_available()
    position = consumed
    while True:
        trained = sequences.trained(position, position + layout.total)
        divisor = torch.tensor(max(trained, 1) / (layout.accumulation * layout.dp_size), dtype=torch.float64)
        for index in range(layout.accumulation):
            first = position + (index * layout.dp_size + layout.dp_rank) * layout.micro
            rows = [sequences[first + row] for row in range(layout.micro)]
            made = _packed(conversations, rows, layout) if layout.packed else _padded(conversations, rows, layout)
            batch = {name: torch.from_numpy(array) for name, array in made.items()}
            if pinned:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            yield {**batch, "loss_tokens": divisor}
        position += layout.total


def _empty(shape: tuple[int, int], pad: int) -> dict[str, np.ndarray]:
    return {
        "tokens": np.full(shape, pad, np.int64),
        "labels": np.full(shape, pad, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.float32),
    }


def _write(made: dict[str, np.ndarray], row: int, begin: int, ids: np.ndarray, learnt: np.ndarray) -> int:
    """Put a conversation at ``begin`` of a row; where it ends. The last token predicts nothing."""
    end = begin + len(ids)
    made["tokens"][row, begin:end] = ids
    made["labels"][row, begin : end - 1] = ids[1:]
    made["loss_mask"][row, begin : end - 1] = learnt[1:]
    made["position_ids"][row, begin:end] = np.arange(len(ids))
    return end


def _packed(conversations: Conversations, rows: list[list[int]], layout: Layout) -> dict[str, np.ndarray]:
    made = _empty((1, layout.micro * layout.seq_length), layout.pad)
    borders = [0]
    for place, numbers in enumerate(rows):
        begin, stop = place * layout.seq_length, (place + 1) * layout.seq_length
        for number in numbers:
            begin = _write(made, 0, begin, *conversations[number])
            borders.append(begin)
        if begin < stop:  # padding is a document of its own
            made["position_ids"][0, begin:stop] = np.arange(stop - begin)
            borders.append(stop)
    return {**made, "cu_seqlens": np.asarray(borders, np.int32)}


def _padded(conversations: Conversations, rows: list[list[int]], layout: Layout) -> dict[str, np.ndarray]:
    longest = max((int(conversations.lengths[n]) for numbers in rows for n in numbers), default=1)
    length = min(-(-longest // _MULTIPLE) * _MULTIPLE, layout.seq_length)
    made = _empty((layout.micro, length), layout.pad)
    made["position_ids"][:] = np.arange(length)
    for row, numbers in enumerate(rows):
        for number in numbers:
            _write(made, row, 0, *conversations[number])
    return made
