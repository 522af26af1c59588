"""Names of experts that ranks divide: what a rank calls its first expert is another one in the whole model.

A model says so in ``universal_checkpoint_info["expert_parallel"]``: ``{"size": ranks, "rank": this rank's place,
"names": {a rank's own name: [the name in the whole model, by place]}}``. DeepSpeed saves this with the model. Places
follow each other among data-parallel ranks: rank d of these has place ``d % size``.

``"joined"``, ``{name: dimension}``, are tensors that hold a rank's experts one behind the other in memory: that of the
whole model is theirs one behind the other, and larger along that dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .stage_names import in_whole

__all__ = ["divided_experts", "joined_experts", "larger", "names_in_whole", "part_of_joined", "whole_names"]


def divided_experts(info: Mapping[str, Any] | None) -> tuple[int, Mapping[str, list[str]]]:
    """How many ranks divide the experts, and their names; of a model without such, 1 and none."""
    told = (info or {}).get("expert_parallel") or {}
    return int(told.get("size", 1)), told.get("names") or {}


def joined_experts(info: Mapping[str, Any] | None) -> Mapping[str, int]:
    """Tensors that hold the experts of a rank together, with the dimension along which experts count."""
    return ((info or {}).get("expert_parallel") or {}).get("joined") or {}


def part_of_joined(engine: Any, name: str, shape: torch.Size) -> tuple[torch.Size, slice] | None:
    """Of a tensor that ranks' experts are joined in: its shape in the whole model, and what of its memory is this
    rank's; None of any other."""
    info = getattr(engine.module, "universal_checkpoint_info", None) or {}
    if (dim := joined_experts(info).get(name)) is None:
        return None
    size, place = info["expert_parallel"]["size"], info["expert_parallel"]["rank"]
    return larger(shape, dim, size), slice(place * shape.numel(), (place + 1) * shape.numel())


def larger(shape: torch.Size, dim: int, times: int) -> torch.Size:
    """A shape with one dimension ``times`` as large."""
    return torch.Size(n * times if i == dim else n for i, n in enumerate(shape))


def names_in_whole(engine: Any) -> dict[Any, str]:
    """``engine.param_names`` with the names that parameters have in the whole model."""
    info = getattr(engine.module, "universal_checkpoint_info", None) or {}
    size, names = divided_experts(info)
    if size == 1:
        rename = in_whole(info)
        return {p: rename(name) for p, name in engine.param_names.items()}
    place = info["expert_parallel"]["rank"]
    return {p: names[name][place] if name in names else name for p, name in engine.param_names.items()}


def whole_names(engine: Any) -> set[str]:
    """Names in the whole model of experts that other ranks hold, and this one."""
    _, names = divided_experts(getattr(engine.module, "universal_checkpoint_info", None))
    return {name for of_all in names.values() for name in of_all}
