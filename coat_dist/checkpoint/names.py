"""How a rank's parameters are called in the whole model, where pipeline stages or ranks that divide
experts rename them.

A model has the names in its attribute ``universal_checkpoint_info``, which DeepSpeed saves with it.

``["pipeline"]``: ``{"stages": stages, "stage": this one, from 0, "virtual_stages": parts of each,
"names": {the stage's name: the name in the whole model}, "prefixes": {how the stage's names of
layers begin: how they begin in the whole model}}``. ``names`` has every parameter, ``prefixes``
serve for buffers and extra states. Two stages may hold the same parameter of the whole model: the
last one has a copy of a tied embedding.

``["expert_parallel"]``: ``{"size": ranks, "rank": this rank's place, "names": {a rank's own name:
[the name in the whole model, by place]}, "joined": {name: dimension}}``. Data-parallel rank d has
place ``d % size``. A tensor of ``joined`` holds all experts of a rank: that of the whole model has
the ranks' tensors one behind the other in memory, and is larger along that dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..ranks import gather

Info = Mapping[str, Any] | None


def info_of(engine: Any) -> Mapping[str, Any]:
    """``universal_checkpoint_info`` of an engine's model; empty where it has none."""
    return getattr(engine.module, "universal_checkpoint_info", None) or {}


def place_in_pipeline(info: Info) -> tuple[int, int]:
    """Stage, from 0, and number of stages; (0, 1) of a whole model."""
    told = (info or {}).get("pipeline") or {}
    return int(told.get("stage", 0)), int(told.get("stages", 1))


def in_whole(info: Info) -> Callable[[str], str]:
    """A function from a pipeline stage's name of anything to the name in the whole model."""
    told = (info or {}).get("pipeline") or {}
    names, prefixes = told.get("names") or {}, told.get("prefixes") or {}

    def whole(name: str) -> str:
        if name in names:
            return names[name]
        prefix = max((one for one in prefixes if name.startswith(one)), key=len, default=None)
        return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)

    return whole


def names_of_others(engine: Any) -> set[str]:
    """Names in the whole model of all parameters and buffers that any pipeline stage or any rank's
    experts hold; collective over stages.
    """
    info, module = info_of(engine), engine.module
    names = {name for of_all in divided_experts(info)[1].values() for name in of_all}
    if place_in_pipeline(info)[1] > 1:
        own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        own += [
            f"{name}._extra_state" if name else "_extra_state" for name, _ in module.named_modules()
        ]
        every = gather(
            list(map(in_whole(info), own)), engine.mpu.get_pipeline_model_parallel_group()
        )
        names |= {name for one in every for name in one}
    return names


def divided_experts(info: Info) -> tuple[int, Mapping[str, list[str]], Mapping[str, int]]:
    """How many ranks divide the experts, their names, and joined tensors with the dimension
    along which they grow.
    """
    told = (info or {}).get("expert_parallel") or {}
    return int(told.get("size", 1)), told.get("names") or {}, told.get("joined") or {}


def part_of_joined(engine: Any, name: str, shape: torch.Size) -> tuple[torch.Size, slice]:
    """A tensor's shape in the whole model, and this rank's part of its memory where ranks'
    experts are joined in it.
    """
    info = info_of(engine)
    size, _, joined = divided_experts(info)
    if name not in joined:
        return shape, slice(None)
    place = info["expert_parallel"]["rank"]
    return larger(shape, joined[name], size), slice(
        place * shape.numel(), (place + 1) * shape.numel()
    )


def larger(shape: torch.Size, dim: int, times: int) -> torch.Size:
    """A shape with one dimension ``times`` as large."""
    return torch.Size(n * times if i == dim else n for i, n in enumerate(shape))


def names_in_whole(engine: Any) -> dict[Any, str]:
    """``engine.param_names`` with the names that parameters have in the whole model."""
    info = info_of(engine)
    rename, (size, names, _) = in_whole(info), divided_experts(info)
    place = info["expert_parallel"]["rank"] if size > 1 else 0
    return {
        p: names[name][place] if name in names else rename(name)
        for p, name in engine.param_names.items()
    }
