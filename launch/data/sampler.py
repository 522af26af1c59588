"""Which samples a data-parallel rank reads, in which order, and micro-batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from launch.data.packed import separate_documents

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class PretrainSampler:
    """Positions of the samples of one data-parallel rank, micro-batch by micro-batch, without end.

    Global position p is read by rank ``p // micro_batch_size % dp_size``. A global batch is
    therefore the same set of samples for any data-parallel and micro-batch size. After
    ``total_samples`` the order begins again.

    Args:
        total_samples: in the dataset; ``consumed_samples`` of them all ranks together have used
            before.
        micro_batch_size: samples that a rank reads at a time.
        dp_rank, dp_size: data-parallel rank and size.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def __iter__(self) -> Iterator[list[int]]:
        position = self.consumed_samples + self.dp_rank * self.micro_batch_size
        while True:
            yield [(position + i) % self.total_samples for i in range(self.micro_batch_size)]
            position += self.micro_batch_size * self.dp_size


def _collate(items: list[dict[str, torch.Tensor]], eod: int | None) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([item[key] for item in items]) for key in _KEYS}
    return batch if eod is None else separate_documents(batch, eod)


def batches(
    dataset: Dataset, sampler: PretrainSampler, num_workers: int = 0, eod: int | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """An endless iterator of micro-batches, from ``sampler.consumed_samples`` on; each call begins
    there again.

    Args:
        dataset: from :func:`build_datasets`.
        sampler: of this rank.
        num_workers: processes that read ahead; 0 = read when asked.
        eod: keep documents, which end with this id, apart:
            :func:`~launch.data.packed.separate_documents`.

    Yields:
        ``tokens``, ``labels``, ``position_ids`` int64 and ``loss_mask`` fp32, each ``[micro_batch,
        seq_length]``, on the CPU (pinned where there is a GPU); with ``eod`` each ``[1, micro_batch
        * seq_length]``, and ``cu_seqlens``.
    """
    # Its own generator: DataLoader draws a seed from torch's global one otherwise, and a resumed
    # run would differ in every random number that follows.
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=partial(_collate, eod=eod),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
    )
    return iter(loader)
