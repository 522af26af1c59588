"""Names of what pipeline stages hold: a stage counts its layers from 0, and they are others in the whole model.

A model says so in ``universal_checkpoint_info["pipeline"]``: ``{"stages": stages, "stage": this one, from 0,
"virtual_stages": parts of each, "names": {the stage's name: the name in the whole model}, "prefixes": {how the stage's
names of layers begin: how they begin in the whole model}}``. DeepSpeed saves this with the model. ``names`` has every
parameter, ``prefixes`` serve for buffers and extra states. Two stages may hold the same parameter of the whole model:
the last one has a copy of a tied embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["in_whole", "learn_names", "names_of_stages", "place_in_pipeline", "ranks_of_a_stage"]


def place_in_pipeline(info: Mapping[str, Any] | None) -> tuple[int, int]:
    """Stage, from 0, and number of stages; (0, 1) of a whole model."""
    told = (info or {}).get("pipeline") or {}
    return int(told.get("stage", 0)), int(told.get("stages", 1))


def ranks_of_a_stage(source: Path, infos: Sequence[Mapping[str, Any] | None]) -> int:
    """Tensor-parallel ranks of each pipeline stage.

    Args:
        source: for errors.
        infos: ``universal_checkpoint_info`` of each model-parallel rank: tensor-parallel ranks of the first stage, then
            those of the next.

    Raises:
        ValueError: they are not of one pipeline, or of stages whose experts are divided over ranks, too.
    """
    places = [place_in_pipeline(info) for info in infos]
    stages = places[0][1]
    size = max(len(infos) // stages, 1)
    if places != [(rank // size, stages) for rank in range(len(infos))]:
        found = ", ".join(dict.fromkeys(f"{stage + 1} of {count}" for stage, count in places))
        raise ValueError(
            f"{source}: model files are of pipeline stages {found}, accepted: those of one pipeline, in order"
        )
    if stages > 1 and any((info or {}).get("expert_parallel") for info in infos):
        raise ValueError(f"{source}: is of pipeline stages whose experts are divided over ranks, accepted: one of both")
    return size


def in_whole(info: Mapping[str, Any] | None) -> Callable[[str], str]:
    """What gives the name in the whole model of anything that a stage holds, by the stage's own name."""
    told = (info or {}).get("pipeline") or {}
    names, prefixes = told.get("names") or {}, told.get("prefixes") or {}

    def whole(name: str) -> str:
        if name in names:
            return names[name]
        prefix = max((one for one in prefixes if name.startswith(one)), key=len, default=None)
        return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)

    return whole


def learn_names(engine: Any) -> None:
    """Let an engine of a pipeline stage know what all stages hold; collective over these, nothing of a whole model."""
    info = getattr(engine.module, "universal_checkpoint_info", None)
    if place_in_pipeline(info)[1] == 1:
        return
    rename, module = in_whole(info), engine.module
    own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    own += [f"{name}._extra_state" if name else "_extra_state" for name, _ in module.named_modules()]
    group = engine.mpu.get_pipeline_model_parallel_group()
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, [rename(name) for name in own], group=group)
    engine.coat_names_of_stages = {name for one in every for name in one}


def names_of_stages(engine: Any) -> set[str]:
    """Names in the whole model of what all stages hold; empty for a whole model."""
    return getattr(engine, "coat_names_of_stages", set())
