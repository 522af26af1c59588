"""Checks before ``engine.load_checkpoint`` reads one of DeepSpeed's own (not universal)
checkpoints.

Such a checkpoint holds what each rank kept: flat shards of parameter groups, padded and cut by one
layout. DeepSpeed loads it by position, and its own checks come late or not at all:

* It finds another ZeRO stage, data-parallel size or optimizer only after it has replaced the
  model's weights. A program that catches the error then trains on with new weights and old moments.
* It does not find flat shards in another order at all, as after a change of parameter groups,
  ``round_robin_gradients`` or ``sub_group_size``: sizes agree, and moments of one parameter go to
  another one.
* It does not know what FP8 codes mean. Codes of another format or group size have the shapes of the
  present ones, and would be read back as other numbers.

So three checks run first, in this order. Each reports one line a mismatch, with the key and both
values, and raises on every rank before anything is read into the model:

1. ``settings``: optimizer, ZeRO stage and numbers of ranks, by the manifest. No file is opened.
2. ``model``: names and shapes of trained parameters, by the model's file. It comes before the third
   check because its error names a parameter of another model, where the third names a place.
3. ``layout``: storage options of each parameter group, and where each parameter lies in the flat
   shards, by this rank's optimizer file. Checkpoints of plain DeepSpeed, which have no manifest,
   are compared by this one alone.

A rank opens only files that it will load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...optim.state import LAYOUT_KEYS
from ..manifest import describe, differences
from ..universal.zero_files import read
from .load_checks import Request, check_before_load

_ACCEPTED = (
    "accepted: what wrote it, or the checkpoint converted by coat_dist.convert_to_universal "
    '(launch/to_universal.py) and "checkpoint": {"load_universal": true}'
)
_COMPARED = {
    "optimizer": "optimizer.type",
    "zero_stage": "zero_optimization.stage",
    "data_parallel": "data-parallel size",
    "tensor_parallel": "tensor-parallel size",
    "pipeline_stages": "pipeline stages",
    "expert_parallel": "expert-parallel size",
}
"""Values of a manifest's "engine" that must be those of this run, and what an error calls them."""


def check_native_loads(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints of another layout with a ``ValueError``, on
    every rank.

    What the error names: ZeRO stage, data- and tensor-parallel size, other parameters, where
    parameters lie in the flat shards, how moments are stored. ``coat_dist.initialize`` calls it for
    CoatAdamW.
    """

    def problems(request: Request) -> list[str]:
        return _settings(engine, request) or _model(engine, request) or _shards(engine, request)

    check_before_load(engine, problems, _ACCEPTED)


def _settings(engine: Any, request: Request) -> list[str]:
    """Whether optimizer, stage and numbers of ranks are those of the checkpoint, by its
    manifest.
    """
    if (request.folder / "zero").is_dir():
        line = "checkpoint.load_universal: checkpoint has true, this run has false"
        return [f"{request.folder}: {line}"]
    saved, ours = request.manifest.get("engine") or {}, describe(engine)
    if {saved.get("zero_stage"), ours["zero_stage"]} == {1, 2}:
        saved = {**saved, "zero_stage": ours["zero_stage"]}  # they write the same files
    keys = [key for key in _COMPARED if key in saved]
    if not request.states:
        # DeepSpeed would take pipeline stages for tensor-parallel ranks. All else is part of the
        # optimizer's files alone, but for experts.
        keys = ["pipeline_stages"] if saved else []
        if ours["expert_parallel"] > 1:
            lacking = "got False, and the experts of other ranks are in the optimizer's files alone"
            return [f"{request.folder}: load_optimizer_states: {lacking}"]
    return _differing(
        request.folder,
        {_COMPARED[key]: saved[key] for key in keys},
        {_COMPARED[key]: ours.get(key) for key in keys},
    )


def _model(engine: Any, request: Request) -> list[str]:
    """Whether the trained parameters are those of the checkpoint; the first difference."""
    path = Path(engine._get_ckpt_name(str(request.load_dir), request.tag))
    if not request.states or not path.is_file():
        return []
    theirs = _shapes(read(path).get("param_shapes"))
    if not theirs:  # not written by ZeRO
        return []
    ours = _shapes(engine._get_zero_param_shapes())
    return _differing(request.folder, theirs, ours)[:1]


def _shapes(groups: Iterable[Mapping[str, Any]] | None) -> dict[str, list[int]]:
    """By "model: " and the parameter's name."""
    return {
        f"model: {name}": list(shape) for group in groups or () for name, shape in group.items()
    }


def _shards(engine: Any, request: Request) -> list[str]:
    """Whether the optimizer's file of this rank stores its groups as this run does, and holds each
    parameter where this run has it.

    At stages 1 and 2 DeepSpeed saves the place of each parameter, and the first difference is
    reported: all that follow are moved by it. At stage 3 it does not, and sizes of sub-groups are
    compared.
    """
    if not request.states:
        return []
    path = Path(engine._get_zero_ckpt_name(str(request.load_dir), request.tag))
    if not path.is_file():
        return [f"{path}: missing"]
    saved, zero = read(path)["optimizer_state_dict"], engine.optimizer
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    states = saved["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    if isinstance(states, Mapping):
        theirs, ours = states["param_groups"], zero.optimizer.param_groups
        if states["state"] and not any(key in group for group in theirs for key in LAYOUT_KEYS):
            return [
                f'{path}: optimizer.type: checkpoint has "another one", this run has "CoatAdamW"'
            ]
        # Another number of groups is a difference of places, below.
        if wrong := _differing(path, _storage(theirs[: len(ours)]), _storage(ours[: len(theirs)])):
            return wrong
    others = "or other groups or frozen parameters"
    if stage3:
        key = f"zero_optimization.sub_group_size, {others}: elements of sub-groups"
        return _differing(
            path,
            {key: [flat.numel() for flat in saved["fp32_flat_groups"]]},
            {key: [flat.numel() for flat in zero.fp32_partitioned_groups_flat]},
        )
    key = (
        f"zero_optimization.round_robin_gradients or parameter_alignment, {others}: (group, "
        "start, numel) of "
    )
    there, here = saved["param_slice_mappings"], zero._param_slice_mappings
    return _differing(path, _places(there, key), _places(here, key))[:1]


def _storage(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How moments and master weights are stored."""
    found = {}
    for i, group in enumerate(groups):
        for key in LAYOUT_KEYS:
            if key in group:
                found[f"{key} of parameter group {i}"] = group[key]
    return found


def _places(mappings: Iterable[Mapping[str, Any]], key: str) -> dict[str, tuple[int, int, int]]:
    """Where parameters lie in the flat shards."""
    return {
        key + name: (i, at.start, at.numel)
        for i, group in enumerate(mappings)
        for name, at in group.items()
    }


def _differing(where: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [f"{where}: {line}" for line in differences(saved, ours).values()]
