"""Checks before ``engine.load_checkpoint`` reads one of DeepSpeed's own (not universal)
checkpoints.

Such a checkpoint fits one layout only. DeepSpeed finds another stage, data-parallel size or
optimizer only after it has replaced the model's weights, and flat shards in another order not at
all. Here each mismatch is one line of one error, before anything is read into the model. A rank
looks only at the files that it will load: a node may have no others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...optim import CoatAdamW
from ...optim.state import LAYOUT_KEYS
from ...ranks import raise_everywhere
from ..manifest import differences, readable
from ..save import describe
from ..universal.zero_files import read
from ..write.publish import latest_of
from ..zero_partitions import base_optimizer
from .load_checks import Request, check_before_load, request_of

__all__ = ["check_native_loads", "refuse_compressed_moments"]

_ACCEPTED = (
    "accepted: what wrote it, or the checkpoint converted by coat_dist.convert_to_universal "
    "(launch/to_universal.py) "
    'and "checkpoint": {"load_universal": true}'
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
    for name, check, accepted in (
        ("settings", _settings, _ACCEPTED),
        ("model", _model, "accepted: a checkpoint of this model, or the model that wrote it"),
        ("layout", _shards, _ACCEPTED),
    ):
        check_before_load(
            engine, name, functools.partial(_unless_universal, engine, check), accepted
        )


def refuse_compressed_moments(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints whose optimizer is CoatAdamW, where its
    states are wanted.

    For engines of another optimizer, with a "coat" block or without. Raises ``ValueError`` on every
    rank, before anything is loaded. DeepSpeed would begin to load one, and end with an error about
    the number of groups.
    """
    if hasattr(engine.load_checkpoint, "coat_checks"):  # finds and verifies the checkpoint first
        check_before_load(
            engine,
            "other optimizer",
            functools.partial(_unless_universal, engine, _optimizer),
            _ACCEPTED,
        )
        return
    original: Callable = engine.load_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        raise_everywhere(
            lambda: _unless_universal(engine, _optimizer, _unverified(call.arguments)), _ACCEPTED
        )
        return original(*args, **kwargs)

    engine.load_checkpoint = load_checkpoint


def _unverified(given: Mapping[str, Any]) -> Request:
    """What DeepSpeed's own ``load_checkpoint`` will load; it reports a missing ``latest``
    itself.
    """
    folder = Path(given["load_dir"])
    tag = latest_of(folder) or "" if given["tag"] is None else str(given["tag"])
    return request_of(given, tag, readable(folder / tag))


def _unless_universal(
    engine: Any, check: Callable[[Any, Request], list[str]], request: Request
) -> list[str]:
    return [] if engine.load_universal_checkpoint() else check(engine, request)


def _optimizer(engine: Any, request: Request) -> list[str]:
    saved = (request.manifest.get("engine") or {}).get("optimizer")
    if not request.states or saved != CoatAdamW.__name__:
        return []
    return _differing(
        request.folder, {"optimizer.type": saved}, {"optimizer.type": describe(engine)["optimizer"]}
    )


def _settings(engine: Any, request: Request) -> list[str]:
    """Whether optimizer, stage and numbers of ranks are those of the checkpoint, by its
    manifest.
    """
    if (request.folder / "zero").is_dir():
        return _differing(
            request.folder,
            {"checkpoint.load_universal": True},
            {"checkpoint.load_universal": False},
        )
    saved, ours = request.manifest.get("engine") or {}, describe(engine)
    if {saved.get("zero_stage"), ours["zero_stage"]} == {1, 2}:
        saved = {**saved, "zero_stage": ours["zero_stage"]}  # they write the same files
    keys = [key for key in _COMPARED if key in saved]
    if not request.states:
        # DeepSpeed would take them for tensor-parallel ranks.
        keys = ["pipeline_stages"] if saved else []
        if ours["expert_parallel"] > 1:
            lacking = "got False, and the experts of other ranks are in the optimizer's files alone"
            return [f"{request.folder}: load_optimizer_states: {lacking}"]
    return _differing(
        request.folder, *({_COMPARED[key]: facts[key] for key in keys} for facts in (saved, ours))
    )


def _model(engine: Any, request: Request) -> list[str]:
    """Whether the parameters are those of the checkpoint: where they are not, no conversion helps.

    A parameter that is trained here and frozen there, or the reverse, is not compared: it is part
    of the layout.
    """
    path = Path(engine._get_ckpt_name(str(request.load_dir), request.tag))
    if not request.states or not path.is_file():
        return []
    saved = read(path)
    theirs, ours = (
        _shapes(groups) for groups in (saved.get("param_shapes"), engine._get_zero_param_shapes())
    )
    if not theirs:
        return []
    there = (
        theirs.keys()
        | (saved.get("frozen_param_shapes") or {}).keys()
        | (saved.get("module") or {}).keys()
    )
    here = ours.keys() | {
        name for name, _ in engine.module.named_parameters(remove_duplicate=False)
    }
    wrong = [n for n, shape in theirs.items() if n not in here or shape != ours.get(n, shape)]
    wrong += [n for n in ours if n not in there]
    if not wrong:
        return []
    key = f"model: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    return _differing(request.folder, {key: theirs.get(wrong[0])}, {key: ours.get(wrong[0])})


def _shapes(groups: Iterable[Mapping[str, Any]] | None) -> dict[str, list[int]]:
    return {name: list(shape) for group in groups or () for name, shape in group.items()}


def _shards(engine: Any, request: Request) -> list[str]:
    """Whether what the optimizer's file of this rank holds lies where it does in this run, and
    is stored so.
    """
    if not request.states:
        return []
    path = Path(engine._get_zero_ckpt_name(str(request.load_dir), request.tag))
    if not path.is_file():
        return [f"{path}: missing"]
    saved, zero = read(path)["optimizer_state_dict"], engine.optimizer
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    if ("fp32_flat_groups" in saved) is not stage3:  # of a checkpoint without a manifest
        stages = [
            {_COMPARED["zero_stage"]: "3" if is3 else "1 or 2"} for is3 in (not stage3, stage3)
        ]
        return _differing(path, *stages)
    states, optimizer = (
        saved["optimizer_state_dict" if stage3 else "base_optimizer_state"],
        base_optimizer(zero),
    )
    if optimizer is not None and isinstance(states, Mapping):
        theirs, ours = states["param_groups"], optimizer.param_groups
        if states["state"] and not any(key in group for group in theirs for key in LAYOUT_KEYS):
            return _differing(
                path, {"optimizer.type": "another one"}, {"optimizer.type": CoatAdamW.__name__}
            )
        if wrong := _differing(path, _storage(theirs[: len(ours)]), _storage(ours[: len(theirs)])):
            return wrong
    others = "or other groups or frozen parameters"
    if stage3:
        key = f"zero_optimization.sub_group_size, {others}: elements of sub-groups"
        flats = saved["fp32_flat_groups"], zero.fp32_partitioned_groups_flat
        return _differing(path, *({key: [t.numel() for t in flat]} for flat in flats))
    key = (
        f"zero_optimization.round_robin_gradients or parameter_alignment, {others}: (group, "
        "start, numel) of "
    )
    places = (saved["param_slice_mappings"], zero._param_slice_mappings)
    return _differing(path, *(_places(mappings, key) for mappings in places))[:1]


def _storage(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How moments and master weights are stored."""
    return {
        f"{key} of parameter group {i}": group[key]
        for i, group in enumerate(groups)
        for key in LAYOUT_KEYS
        if key in group
    }


def _places(mappings: Iterable[Mapping[str, Any]], key: str) -> dict[str, tuple[int, int, int]]:
    """Where parameters lie in the flat shards."""
    return {
        key + name: (i, at.start, at.numel)
        for i, group in enumerate(mappings)
        for name, at in group.items()
    }


def _differing(where: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [f"{where}: {line}" for line in differences(saved, ours).values()]
