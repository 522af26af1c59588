"""The ranks that share a layer, and the collectives that the flow runs over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from ..formats import QuantizedTensor

__all__ = ["TensorParallel", "gather_into"]

# torch 2.13 renamed both collectives and deprecated the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_into(out: torch.Tensor, t: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to gather all ranks' ``t`` ``[n]`` into ``out`` ``[size * n]``."""
    return _all_gather(out, t, group=group, async_op=True)


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share a layer, and whether they split the sequence too. ``TensorParallel()`` means one rank."""

    group: dist.ProcessGroup | None = None
    """None means one rank, never the default group."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        # Looked up here, for torch.compile: before Python 3.12 a cached property takes a lock, which it cannot trace.
        _ = self.size, self.rank

    @cached_property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def sharded(self) -> bool:
        """Whether rows (dimension 0) really are split over ranks."""
        return self.sequence_parallel and self.size > 1

    def with_sequence_parallel(self, sequence_parallel: bool) -> TensorParallel:
        """The same ranks, splitting the sequence or not. Makes no new object from the second switch on."""
        return self if self.group is None or sequence_parallel == self.sequence_parallel else self._switched

    @cached_property
    def _switched(self) -> TensorParallel:
        return TensorParallel(self.group, not self.sequence_parallel)

    def max_(self, t: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, in place. NaN may be lost on the way: an amax has none."""
        if self.size > 1:
            dist.all_reduce(t, dist.ReduceOp.MAX, group=self.group)
        return t

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Overwrites ``t``, which must be contiguous, and returns it."""
        if self.size > 1:
            dist.all_reduce(t, group=self.group)
        return t

    def gather_rows(self, t: torch.Tensor) -> torch.Tensor:
        """All ranks' ``t`` one after the other along dimension 0. FP8 travels as bytes: not every backend knows it."""
        if self.size == 1:
            return t
        payload = t.contiguous()
        if payload.dtype.itemsize == 1:
            payload = payload.view(torch.uint8)
        out = payload.new_empty(self.size * t.shape[0], *t.shape[1:])
        _all_gather(out, payload, group=self.group)
        return out.view(t.dtype)

    def gather_quantized(self, q: QuantizedTensor) -> QuantizedTensor:
        """All ranks' rows of a tensor quantized by rows, codes and scales."""
        return QuantizedTensor(self.gather_rows(q.codes), self.gather_rows(q.scales), q.layout)

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., h]`` as rows ``[rows, h]``, those of all ranks where they are split."""
        rows = x.reshape(-1, x.shape[-1])
        return self.gather_rows(rows) if self.sharded else rows

    def own_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 where rows are split over ranks, all of them otherwise."""
        return t.chunk(self.size)[self.rank] if self.sharded else t

    def reduce_scatter_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 of the sum over ranks.

        Raises:
            ValueError: dimension 0 is no multiple of the number of ranks.
        """
        if self.size == 1:
            return t
        if t.shape[0] % self.size:
            raise ValueError(f"sequence parallelism: got {t.shape[0]} rows, accepted: a multiple of {self.size} ranks")
        out = t.new_empty(t.shape[0] // self.size, *t.shape[1:])
        _reduce_scatter(out, t.contiguous(), group=self.group)
        return out
