"""What is wrong with ``"scheduler"``: DeepSpeed finds it out when the engine is built already, and names no key."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..config import look_up
from ..config_errors import did_you_mean

__all__ = ["wrong_schedule"]


def wrong_schedule(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for an unknown schedule, or for each of its parameters that is unknown, missing or of a wrong kind."""
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    name = look_up(config, "scheduler.type")
    if name is None:  # then DeepSpeed reads nothing else of the block
        block = look_up(config, "scheduler")
        if isinstance(block, Mapping) and block and "type" not in block:
            yield f"scheduler.type: missing, accepted: {', '.join(map(json.dumps, VALID_LR_SCHEDULES))}"
        return
    zero = look_up(config, "zero_optimization.stage")
    schedule = _class_of(name, torchs=not zero)
    if schedule is None:
        hint = did_you_mean(name, VALID_LR_SCHEDULES) if isinstance(name, str) else ""
        others = "" if zero else ", or the name of a schedule of torch"
        # torch's own take no optimizer but torch's, which ZeRO's are not
        instead = "; others as the argument lr_scheduler, a function of the optimizer" if zero else ""
        names = ", ".join(map(json.dumps, VALID_LR_SCHEDULES))
        yield f"scheduler.type: got {json.dumps(name, default=str)}{hint}, accepted: {names}{others}{instead}"
        return
    params = look_up(config, "scheduler.params")
    if params is None:
        yield "scheduler.params: got null, accepted: an object with the schedule's parameters, or {} for its defaults"
        return
    if isinstance(params, Mapping):  # else another line says so
        yield from _wrong_parameters(schedule, params)


def _class_of(name: Any, torchs: bool) -> type | None:
    """What DeepSpeed makes of a name: a schedule of its own, or else one of torch's."""
    from deepspeed.runtime import lr_schedules

    modules = (lr_schedules, torch.optim.lr_scheduler) if torchs else (lr_schedules,)
    found = (getattr(module, name, None) for module in modules if isinstance(name, str))
    classes = (c for c in found if isinstance(c, type) and "optimizer" in inspect.signature(c).parameters)
    return next(classes, None)


def _wrong_parameters(schedule: type, params: Mapping[str, Any]) -> Iterator[str]:
    declared = [p for p in inspect.signature(schedule).parameters.values() if p.name != "optimizer"]
    known = {p.name: p for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared)
    for key, value in params.items():
        if key not in known:
            if takes_any and key != "optimizer":
                continue
            yield f"scheduler.params.{key}: unknown key{did_you_mean(str(key), known)}, accepted: {', '.join(known)}"
        elif isinstance(value, str) and value != "auto" and _number(known[key]):
            yield f"scheduler.params.{key}: got {json.dumps(value)}, accepted: a number"
    for key, parameter in known.items():
        if key not in params and parameter.default is parameter.empty:
            yield f"scheduler.params.{key}: missing, accepted: a value ({schedule.__name__} has no default)"


def _number(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is declared as a number, or has one for default."""
    return parameter.annotation in (int, float) or type(parameter.default) in (int, float)
