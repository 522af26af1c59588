"""Low-rank adapters (LoRA) of the weights of an FP8 product: ``y = x W' + s (x A') B'``.

Adapters of all weights of one product are one adapter: their A one below the other, their B on the
diagonal of one matrix, with the scales multiplied in. Autograd does this outside of the flow's
functions (:func:`joined_adapters`), where tensors are small; inside, :class:`LowRank` computes with
the one pair. Products are in x's dtype, to which wider adapters are rounded, as under autocast:
fp32 products would take a tenth of a step.

Saved are ``x A'``, r columns, and the seed of the dropout. Forward reads x where it has it; A's
gradient reads the 8-bit x that is saved for the norm or for wgrad. Neither reads the output of a
norm, which nothing has written: a norm's factors of rows and columns multiply the small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..parallel.tensor_parallel import TensorParallel

ADAPTER = "a", "b", "dropout", "xa"
"""Names that a function saves for an adapter; behind a prefix where there are several."""


class Adapter(NamedTuple):
    """The term ``scale * dropout(x) @ a.T @ b.T`` of a linear's output."""

    a: torch.Tensor
    """``[r, in]``."""
    b: torch.Tensor
    """``[out, r]``."""
    scale: float = 1.0
    dropout: float = 0.0
    """The share of x's elements that are dropped."""


Adapters = Sequence[Sequence[Adapter]]
"""For each weight of a product the adapters that are active on it; empty where there are none."""


class Factors(NamedTuple):
    """The input of a product, as ``values * rows * columns``."""

    values: torch.Tensor
    """``[..., in]``."""
    rows: torch.Tensor | None = None
    """``[rows, 1]``."""
    columns: torch.Tensor | None = None
    """``[in]``."""


def joined_adapters(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    adapters: Adapters,
    tp: TensorParallel,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """One adapter for all weights of a product with x: A, scaled B, and what its dropout needs, in
    host memory: the rate and a seed. None without adapters.

    Raises:
        ValueError: what the flow cannot compute; names the argument.
    """
    active = [adapter for of_weight in adapters for adapter in of_weight]
    if not active:
        return None, None, None
    rates = {adapter.dropout for adapter in active}
    if tp.size > 1 or len(rates) > 1:
        raise ValueError(
            f"adapters: got {tp.size} tensor-parallel ranks, dropout {sorted(rates)}, accepted: "
            "one rank, one dropout for all adapters of a product"
        )
    rate, dropout = rates.pop(), None
    if rate:
        # Checkpointing restores the state of this generator before it computes again.
        dropout = torch.randint(2**53, (2,), device="cpu").double()
        dropout[0] = rate
    blocks = []
    for weight, of_weight in zip(weights, adapters, strict=True):
        block = [(one.b * (one.scale / (1.0 - rate))).to(x.dtype) for one in of_weight]
        blocks.append(torch.cat(block or [x.new_empty(weight.shape[0], 0)], 1))
    return torch.cat([one.a.to(x.dtype) for one in active]), torch.block_diag(*blocks), dropout


@dataclass
class LowRank:
    """The adapter of one product in one call of an autograd function. Where there is none, it does
    nothing.
    """

    a: Any
    b: Any
    dropout: Any
    xa: Any = None
    dxa: Any = None
    """The gradient of xa."""
    db: Any = None

    @classmethod
    def restored(cls, saved: Any, prefix: str = "") -> LowRank:
        """In backward, from what forward saved."""
        return cls(*(getattr(saved, prefix + name) for name in ADAPTER))

    def save(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors for ``save_for_backward``, in the order of :data:`ADAPTER`."""
        return self.a, self.b, self.dropout, self.xa

    def add(self, out: torch.Tensor, source: Callable[[], Factors]) -> None:
        """Add the term to the product's output ``[rows, out]``; ``source`` gives its input."""
        if self.a is not None:
            values, rows, columns = source()
            self.xa = _scaled(self._dropped(values) @ _scaled(self.a, columns).t(), rows)
            out.addmm_(self.xa, self.b.t())

    def receive(self, dout: torch.Tensor) -> None:
        """The gradient of the product's output, ``[rows, out]``."""
        if self.a is not None:
            self.dxa = dout @ self.b
            self.db = dout.t() @ self.xa

    def add_gradient(self, dx: torch.Tensor) -> torch.Tensor:
        """The gradient of the product's input, ``[rows, in]``, with the term's part."""
        if self.dropout is not None:
            dx += self._dropped(self.dxa @ self.a)
        elif self.a is not None:
            dx.addmm_(self.dxa, self.a)
        return dx

    def gradients(self, source: Callable[[], Factors]) -> tuple[torch.Tensor | None, ...]:
        """Of what :func:`joined_adapters` gave."""
        da = None
        if self.a is not None and self.a.requires_grad:
            values, rows, columns = source()
            da = _scaled(_scaled(self.dxa, rows).t() @ self._dropped(values), columns)
        return da, self.db, None

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of x, the same elements dropped each time. The factor for the others is in B."""
        x = x.reshape(-1, x.shape[-1])
        if self.dropout is None:
            return x
        rate, seed = self.dropout.tolist()
        generator = torch.Generator(x.device).manual_seed(int(seed))
        kept = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return kept.bernoulli_(1.0 - rate, generator=generator).mul_(x)


def _scaled(t: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return t if factor is None else (t * factor).to(t.dtype)
