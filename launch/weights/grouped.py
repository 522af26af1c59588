"""Experts of a layer in one tensor for fc1 and one for fc2 (Megatron's ``GroupedMLP``), and as tensors of each expert.

``weight1`` is declared ``[h, experts * n]`` and ``weight2`` ``[experts * f, h]``; Megatron reads their memory as
``[experts, h, n]`` and ``[experts, f, h]``, in which each expert's matrix is the transpose of its linear's weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from launch.weights.source import CheckpointError

__all__ = ["Ungrouped", "each_expert", "grouped"]

_GROUPED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.weight(?P<fc>[12])")


def each_expert(name: str, experts: Iterable[int]) -> list[str]:
    """Names of the weights that a grouped parameter holds, by the experts' numbers; none of any other parameter."""
    if (found := _GROUPED.fullmatch(name)) is None:
        return []
    return [f"{found['experts']}.local_experts.{e}.linear_fc{found['fc']}.weight" for e in experts]


def grouped(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory of a grouped parameter, ``[experts, in, out]``, of the weights ``[out, in]`` of its experts."""
    return torch.stack([weight.t() for weight in weights])


class Ungrouped:
    """Tensors of a checkpoint, those of grouped experts one by one.

    Args:
        source: has ``shapes`` by name, ``read(name)``, and ``divided(name)``: tensor-parallel ranks were joined.
        experts: of a layer.
        hidden: hidden size.

    Raises:
        CheckpointError: grouped experts that tensor-parallel ranks divide: joined along a dimension, they are mixed up.
    """

    def __init__(self, source: Any, experts: int, hidden: int) -> None:
        self.source, self.experts, self.hidden = source, experts, hidden
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._of: dict[str, tuple[str, int]] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        for name, shape in source.shapes.items():
            names = each_expert(name, range(experts))
            if not names:
                self.shapes[name] = shape
                continue
            if source.divided(name):
                raise CheckpointError(f"{name}: divided over tensor-parallel ranks, accepted: --tensor-parallel 1")
            inner = shape[0] * shape[1] // (experts * hidden)
            for i, one in enumerate(names):
                self.shapes[one] = (inner, hidden) if "linear_fc1" in one else (hidden, inner)
                self._of[one] = (name, i)

    def read(self, name: str) -> torch.Tensor:
        """A tensor, whole. Of grouped experts the tensor that was read last is kept."""
        if name not in self._of:
            return self.source.read(name)
        whole, i = self._of[name]
        if self._last is None or self._last[0] != whole:
            self._last = None
            self._last = (whole, self.source.read(whole))
        rows, columns = self.shapes[name]
        one = self._last[1].reshape(self.experts, columns, rows)[i].t().contiguous()
        if i == self.experts - 1:
            self._last = None
        return one
