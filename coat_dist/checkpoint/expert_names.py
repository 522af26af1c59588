"""Names of experts that ranks divide: what a rank calls its first expert is another one in the whole model.

A model says so in ``universal_checkpoint_info["expert_parallel"]``: ``{"size": ranks, "rank": this rank's place,
"names": {a rank's own name: [the name in the whole model, by place]}}``. DeepSpeed saves this with the model. Places
follow each other among data-parallel ranks: rank d of these has place ``d % size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["divided_experts", "names_in_whole", "whole_names"]


def divided_experts(info: Mapping[str, Any] | None) -> tuple[int, Mapping[str, list[str]]]:
    """How many ranks divide the experts, and their names; of a model without such, 1 and none."""
    told = (info or {}).get("expert_parallel") or {}
    return int(told.get("size", 1)), told.get("names") or {}


def names_in_whole(engine: Any) -> dict[Any, str]:
    """``engine.param_names`` with the names that parameters have in the whole model."""
    info = getattr(engine.module, "universal_checkpoint_info", None)
    size, names = divided_experts(info)
    if size == 1:
        return engine.param_names
    place = info["expert_parallel"]["rank"]
    return {p: names[name][place] if name in names else name for p, name in engine.param_names.items()}


def whole_names(engine: Any) -> set[str]:
    """Names in the whole model of experts that other ranks hold, and this one."""
    _, names = divided_experts(getattr(engine.module, "universal_checkpoint_info", None))
    return {name for of_all in names.values() for name in of_all}
