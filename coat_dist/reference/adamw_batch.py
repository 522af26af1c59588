"""Tensors that are stepped together again and again, without a tuple for each of them in each
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .adamw import AdamWTensors, FP32Tensors
from .moments import Moment


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

    def __getitem__(self, i: Any) -> Any:
        """One parameter's tensors; ``i`` is an index and no slice."""
        param, grad = self.params[i], self.grads[i]
        low = None
        if self.lows is not None:
            low = self.lows[i].view(torch.int16).view(-1)[: param.numel()]
        copy = None if self.copies is None else self.copies[i]
        count = None if self.counts is None else self.counts[i]
        if len(self.moments) == 2 * len(self.params):
            first, second = self.moments[2 * i : 2 * i + 2]
            return FP32Tensors(param, grad, first, second, low, copy, count)
        q, a, k, *second_moment = self.moments[6 * i : 6 * i + 6]
        seed = None if self.seeds is None else self.seeds[i]
        return AdamWTensors(
            param, grad, Moment(q, a, k), Moment(*second_moment), seed, low, copy, count
        )


def written(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters and copies."""
    if isinstance(tensors, Batch):
        return [*tensors.params, *(tensors.copies or ())]
    return [t for one in tensors for t in (one.param, one.copy) if t is not None]
