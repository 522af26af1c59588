"""The ranks that share a layer, and the collectives that the flow runs over them.

Large collectives are started and waited for apart: ``start_...`` gives a :class:`Pending`, and what
is computed before its ``wait()`` hides them. On a GPU waiting is the current stream's; the host
goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ...formats import QuantizedTensor
from .peer_memory import PeerMemory, peer_memory

T = TypeVar("T")
U = TypeVar("U")

# torch 2.13 renamed both collectives and deprecated the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Generic[T]):
    """What a collective under way will have made, or a result that waits for none.

    Holds the collective's operands, which nobody may change or free before :meth:`wait`.
    """

    def __init__(
        self, result: Callable[[], T], works: tuple[Any, ...] = (), operands: Any = None
    ) -> None:
        self._result: Callable[[], T] | None = result
        self._works = works
        self._operands = operands

    def wait(self) -> T:
        """The result; to be called once."""
        for work in self._works:
            work.wait()
        result, self._result, self._operands = self._result, None, None
        assert result is not None
        return result()

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """``function`` of the result, when that is waited for. Takes the place of this object."""
        assert self._result is not None
        result = self._result
        return Pending(lambda: function(result()), self._works, self._operands)

    def settled(self) -> Pending[T]:
        """This; computed at once where no other rank takes part, so that what it is computed
        from can be freed.
        """
        if self._works:
            return self
        value = self.wait()
        return Pending(lambda: value)


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share a layer, and whether they split the sequence too.
    ``TensorParallel()`` means one rank.
    """

    group: dist.ProcessGroup | None = None
    """None means one rank, never the default group."""
    sequence_parallel: bool = False
    reads_peers: bool = True
    """Whether large collectives may go through memory that ranks read from each other
    (``peer_memory.py``).
    """

    def __post_init__(self) -> None:
        # Looked up here, for torch.compile: before Python 3.12 a cached property takes a lock,
        # which it cannot trace.
        _ = self.size, self.rank, self.for_backward

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
        """The same ranks, splitting the sequence or not. Makes no new object from the second
        switch on.
        """
        return (
            self
            if self.group is None or sequence_parallel == self.sequence_parallel
            else self._switched
        )

    @cached_property
    def _switched(self) -> TensorParallel:
        return TensorParallel(self.group, not self.sequence_parallel, self.reads_peers)

    @cached_property
    def for_backward(self) -> TensorParallel:
        """The same ranks, who leave backward's collectives to the backend: other products hide them
        there as well, and the host has less to do.
        """
        if self.group is None or not self.reads_peers:
            return self
        return TensorParallel(self.group, self.sequence_parallel, False)

    def peers(self, elements: int, itemsize: int, device: torch.device) -> PeerMemory | None:
        """Memory that these ranks read from each other, if they can and so many elements are
        worth it.
        """
        if self.size == 1 or not self.reads_peers:
            return None
        return peer_memory(self.group, elements, itemsize, device)

    def max_(self, t: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks, in place. NaN may be lost on the way: an amax has
        none.
        """
        return self.start_max(t).wait()

    def start_max(self, t: torch.Tensor) -> Pending[torch.Tensor]:
        """:meth:`max_`, under way."""
        if self.size == 1:
            return Pending(lambda: t)
        return Pending(
            lambda: t, (dist.all_reduce(t, dist.ReduceOp.MAX, group=self.group, async_op=True),)
        )

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Overwrites ``t``, which must be contiguous, and returns it."""
        return self.start_sum(t).wait()

    def start_sum(self, t: torch.Tensor) -> Pending[torch.Tensor]:
        """:meth:`sum`, under way."""
        if self.size == 1:
            return Pending(lambda: t)
        return Pending(lambda: t, (dist.all_reduce(t, group=self.group, async_op=True),))

    def gather_rows(self, t: torch.Tensor) -> torch.Tensor:
        """All ranks' ``t`` one after the other along dimension 0."""
        return self.start_gather(t).wait()[0]

    def start_gather(self, *tensors: torch.Tensor) -> Pending[tuple[torch.Tensor, ...]]:
        """:meth:`gather_rows` of several tensors in one collective, under way. They travel as
        bytes: not every backend knows FP8, and gloo wants one type.
        """
        if self.size == 1:
            return Pending(lambda: tensors)
        first = tensors[0]
        if (peers := self.peers(first.numel(), first.itemsize, first.device)) is not None:
            whole, coming = peers.gather([t.contiguous() for t in tensors])
            return Pending(lambda: tuple(whole), tuple(coming.values()))
        payloads = [t.contiguous().view(torch.uint8) for t in tensors]
        outs = [p.new_empty(self.size * p.shape[0], *p.shape[1:]) for p in payloads]
        works: tuple[Any, ...]
        if len(tensors) == 1:
            works = (all_gather(outs[0], payloads[0], group=self.group, async_op=True),)
        else:
            with dist._coalescing_manager(self.group, async_ops=True) as together:
                for out, payload in zip(outs, payloads, strict=True):
                    all_gather(out, payload, group=self.group, async_op=True)
            works = (together,)
        dtypes = [t.dtype for t in tensors]
        return Pending(
            lambda: tuple(out.view(dtype) for out, dtype in zip(outs, dtypes, strict=True)),
            works,
            payloads,
        )

    def start_gather_quantized(self, q: QuantizedTensor) -> Pending[QuantizedTensor]:
        """All ranks' rows of a tensor quantized by rows, codes and scales in one collective,
        under way.
        """
        return self.start_gather(q.codes, q.scales).then(
            lambda t: QuantizedTensor(t[0], t[1], q.layout)
        )

    def all_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[..., h]`` as rows ``[rows, h]``, those of all ranks where they are split."""
        rows = x.reshape(-1, x.shape[-1])
        return self.gather_rows(rows) if self.sharded else rows

    def own_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 where rows are split over ranks, all of them
        otherwise.
        """
        return t.chunk(self.size)[self.rank] if self.sharded else t

    def reduce_scatter_rows(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's share along dimension 0 of the sum over ranks.

        Raises:
            ValueError: dimension 0 is no multiple of the number of ranks.
        """
        return self.start_reduce_scatter(t).wait()

    def start_reduce_scatter(self, t: torch.Tensor) -> Pending[torch.Tensor]:
        """:meth:`reduce_scatter_rows`, under way."""
        if self.size == 1:
            return Pending(lambda: t)
        if t.shape[0] % self.size:
            raise ValueError(
                f"sequence parallelism: got {t.shape[0]} rows, accepted: a multiple of {self.size} "
                "ranks"
            )
        out, t = t.new_empty(t.shape[0] // self.size, *t.shape[1:]), t.contiguous()
        return Pending(lambda: out, (_reduce_scatter(out, t, group=self.group, async_op=True),), t)
