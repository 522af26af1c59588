"""Checks before ``engine.load_checkpoint`` reads one of DeepSpeed's own (not universal) checkpoints.

Such a checkpoint fits one layout only. DeepSpeed meets another stage with an empty AssertionError, another
data-parallel size at stage 3 with a complaint about tensor sizes, both after it has replaced the model's weights, and
flat shards in another order not at all. Here each of them is one error, before anything is read into the model.

A rank looks at no other files than those it is going to load: with ``use_node_local_storage`` it has no others. How
many ranks wrote the checkpoint is said in them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...optim.state import LAYOUT_KEYS
from ..expert_names import divided_experts
from ..stage_names import place_in_pipeline
from ..universal.zero_files import MODEL, MODEL3, read
from ..zero_partitions import base_optimizer
from .load_checks import Request, check_before_load
from .other_engines import pipeline_stages

__all__ = ["check_native_loads"]

_ACCEPTED = (
    "accepted: what wrote it, or the checkpoint converted by coat_dist.convert_to_universal (launch/to_universal.py) "
    'and "checkpoint": {"load_universal": true}'
)
_OTHERS = "or other groups or frozen parameters"
_ACCEPTED_MODEL = "accepted: a checkpoint of this model, or the model that wrote it"


def check_native_loads(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints of another layout with a ``ValueError``, on every rank.

    What the error names: ZeRO stage, data- and tensor-parallel size, other parameters, where parameters lie in the flat
    shards, how moments are stored. Loads without optimizer states are left to DeepSpeed. ``coat_dist.initialize`` calls
    it for CoatAdamW.
    """
    check_before_load(engine, "native", functools.partial(_settings, engine), _ACCEPTED)
    check_before_load(engine, "model", functools.partial(_model, engine), _ACCEPTED_MODEL)
    check_before_load(engine, "layout", functools.partial(_shards, engine), _ACCEPTED)


def _settings(engine: Any, request: Request) -> list[str]:
    """Whether stage and numbers of ranks are those of the checkpoint."""
    folder = request.folder
    if engine.load_universal_checkpoint():
        return []
    ours, _ = divided_experts(getattr(engine.module, "universal_checkpoint_info", None))
    if not request.states:
        lacking = "load_optimizer_states: got False, and the experts of other ranks are in the optimizer's files alone"
        return [f"{folder}: {lacking}"] if ours > 1 else _other_stages(engine, folder)
    if (folder / "zero").is_dir():
        return [f"checkpoint.load_universal: got false, but {folder} is a universal checkpoint"]
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    kinds = {MODEL3: "3", MODEL: "1 or 2"}
    own = MODEL3 if engine.zero_optimization_stage() == 3 else MODEL
    models = {kind: [folder / n for n in names if re.fullmatch(kind, n)] for kind in (own, *(kinds.keys() - {own}))}
    found, path = next(((kind, paths[0]) for kind, paths in models.items() if paths), (None, folder))
    if found is None:
        return [f"{folder}: no file matches {own}"]
    saved = read(path)
    compared = {
        "zero_optimization.stage": (kinds[found], kinds[own]),
        # With sequence parallelism (Ulysses), ZeRO's shards are divided by data- times sequence-parallel ranks.
        "data-parallel size": (saved.get("dp_world_size"), getattr(engine, "seq_dp_world_size", engine.dp_world_size)),
        **_model_parallel(saved, engine),
        "expert-parallel size": (divided_experts(saved.get("universal_checkpoint_info"))[0], ours),
    }
    return [
        f"{folder}: {name}: checkpoint has {theirs}, this run has {ours}"
        for name, (theirs, ours) in compared.items()
        if theirs is not None and theirs != ours
    ]


def _model(engine: Any, request: Request) -> list[str]:
    """Whether the parameters are those of the checkpoint: where they are not, no conversion helps.

    One that is trained here and frozen there, or the other way round, is not meant: it belongs to the layout.
    """
    path = Path(engine._get_ckpt_name(str(request.load_dir), request.tag))
    if engine.load_universal_checkpoint() or not request.states or not path.is_file():
        return []
    saved = read(path)
    theirs, ours = (_shapes(groups) for groups in (saved.get("param_shapes"), engine._get_zero_param_shapes()))
    if not theirs:
        return []
    there = theirs.keys() | (saved.get("frozen_param_shapes") or {}).keys() | (saved.get("module") or {}).keys()
    here = ours.keys() | {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    wrong = [n for n, shape in theirs.items() if n not in here or shape != ours.get(n, shape)]
    wrong += [n for n in ours if n not in there]
    if not wrong:
        return []
    first, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    has, this = (f"shape {shapes[first]}" if first in shapes else "none" for shapes in (theirs, ours))
    return [f"{request.folder}: model: {first}{more}: checkpoint has {has}, this run has {this}"]


def _shapes(groups: Iterable[Mapping[str, Any]] | None) -> dict[str, list[int]]:
    return {name: list(shape) for group in groups or () for name, shape in group.items()}


def _shards(engine: Any, request: Request) -> list[str]:
    """Whether what the optimizer's file of this rank holds lies where it does in this run, and is stored so."""
    if engine.load_universal_checkpoint() or not request.states:
        return []
    path = Path(engine._get_zero_ckpt_name(str(request.load_dir), request.tag))
    if not path.is_file():
        # DeepSpeed's names of these files say whether bf16 was on.
        on = path.name.startswith("bf16_")
        if path.with_name(path.name.removeprefix("bf16_") if on else f"bf16_{path.name}").is_file():
            has, this = ("false", "true") if on else ("true", "false")
            return [f"{request.folder}: bf16.enabled: checkpoint has {has}, this run has {this}"]
        return [f"{path}: missing"]
    saved = read(path)["optimizer_state_dict"]
    # Another optimizer has other groups, too: that is not what is to be said first.
    return _storage(engine.optimizer, path, saved) or _layout(engine.optimizer, path, saved)


def _other_stages(engine: Any, folder: Path) -> list[str]:
    """Whether weights are of other pipeline stages, which DeepSpeed would take for tensor-parallel ranks."""
    path = next(iter(sorted(folder.glob("mp_rank_*_model_states.pt"))), None)
    saved = {} if path is None else read(path)
    theirs, ours = _model_parallel(saved, engine).get("pipeline stages", (1, 1))
    return [] if theirs == ours else [f"{folder}: pipeline stages: checkpoint has {theirs}, this run has {ours}"]


def _model_parallel(saved: Mapping[str, Any], engine: Any) -> dict[str, tuple[Any, Any]]:
    """Tensor-parallel size and, where either has several, pipeline stages: theirs and ours."""
    ours = pipeline_stages(engine)
    theirs = place_in_pipeline(saved.get("universal_checkpoint_info"))[1]
    size = saved.get("mp_world_size")
    found = {"tensor-parallel size": (None if size is None else size // theirs, engine.mp_world_size // ours)}
    return found if ours == theirs == 1 else {**found, "pipeline stages": (theirs, ours)}


def _layout(zero: Any, path: Path, saved: Mapping[str, Any]) -> list[str]:
    """Whether flat shards hold the same elements in the same places."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        sizes = [[t.numel() for t in flat] for flat in (saved["fp32_flat_groups"], zero.fp32_partitioned_groups_flat)]
        if sizes[0] != sizes[1]:
            return [
                f"{path}: zero_optimization.sub_group_size, {_OTHERS}: checkpoint has sub-groups of "
                f"{sizes[0]} elements, this run has {sizes[1]}"
            ]
        return []
    places = [
        {name: (i, at.start, at.numel) for i, group in enumerate(mappings) for name, at in group.items()}
        for mappings in (saved["param_slice_mappings"], zero._param_slice_mappings)
    ]
    wrong = sorted(n for n in places[0].keys() | places[1].keys() if places[0].get(n) != places[1].get(n))
    if not wrong:
        return []
    there, here = (p.get(wrong[0]) for p in places)
    return [
        f"{path}: zero_optimization.round_robin_gradients or parameter_alignment, {_OTHERS}: "
        f"{wrong[0]} is at {_at(there)} in the checkpoint and at {_at(here)} in this run"
    ]


def _storage(zero: Any, path: Path, saved: Mapping[str, Any]) -> list[str]:
    """Whether moments and master weights are stored as this run stores them."""
    optimizer = base_optimizer(zero)
    states = saved.get("optimizer_state_dict" if "fp32_flat_groups" in saved else "base_optimizer_state")
    if optimizer is None or not isinstance(states, Mapping):
        return []
    if states["state"] and not any(key in group for group in states["param_groups"] for key in LAYOUT_KEYS):
        return [f"{path}: optimizer.type: checkpoint has states of another optimizer, this run has CoatAdamW"]
    return [
        f"{path}: {key} of parameter group {i}: checkpoint has {theirs[key]!r}, this run has {ours[key]!r}"
        for i, (theirs, ours) in enumerate(zip(states["param_groups"], optimizer.param_groups, strict=False))
        for key in LAYOUT_KEYS
        if key in theirs and theirs[key] != ours[key]
    ]


def _at(place: tuple[int, int, int] | None) -> str:
    return "no place" if place is None else f"elements {place[1]} to {place[1] + place[2]} of group {place[0]}"
