"""Tensors that are stepped together again and again, without a tuple for each of them in each
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from .adamw import AdamWTensors, FP32Tensors
from .moments import Moment

__all__ = ["Batch", "written"]


@dataclass
class Batch(Sequence):
    """A sequence of :class:`AdamWTensors`, or of :class:`FP32Tensors`, held as columns. All tensors
    are contiguous.

    A kernel may keep in ``kept`` what it derives from all but the gradients. Whoever makes batches
    gives two of them the same ``kept`` only if they agree in the addresses, sizes and types of all
    tensors but the gradients, in the sizes and types of these, and in the seeds.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    moments: list[torch.Tensor]
    """Of each parameter six tensors (q, a, k of the first and of the second moment), or two if
    these are fp32.
    """
    seeds: list[int] | None = None
    lows: list[torch.Tensor] | None = None
    """Remainders as a state holds them: uint8, twice as many as there are elements, or more."""
    copies: list[torch.Tensor] | None = None
    counts: list[torch.Tensor] | None = None
    addresses: list[int] = field(default_factory=list)
    """Of the gradients."""
    kept: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.params)

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> list: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        param = self.params[i]
        low = (
            None if self.lows is None else self.lows[i].view(torch.int16).view(-1)[: param.numel()]
        )
        rest = (
            low,
            *(None if column is None else column[i] for column in (self.copies, self.counts)),
        )
        if len(self.moments) == 2 * len(self.params):
            return FP32Tensors(param, self.grads[i], *self.moments[2 * i : 2 * i + 2], *rest)
        first, second = (Moment(*self.moments[j : j + 3]) for j in (6 * i, 6 * i + 3))
        seed = None if self.seeds is None else self.seeds[i]
        return AdamWTensors(param, self.grads[i], first, second, seed, *rest)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self.params)))


def written(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters and copies."""
    if isinstance(tensors, Batch):
        return [*tensors.params, *(tensors.copies or ())]
    return [t for one in tensors for t in (one.param, one.copy) if t is not None]
