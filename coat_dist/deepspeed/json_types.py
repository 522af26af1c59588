"""What is no object, no stage or no number in a DeepSpeed configuration, before anything is looked up in it.

DeepSpeed would end in an AttributeError or TypeError that names no key, some of them in the first step.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from ..config import look_up, without_comments
from .known_keys import models
from .schedules import wrong_schedule

__all__ = ["as_read", "wrong_types"]

_BLOCKS = (
    *("optimizer", "scheduler", "fp16", "bf16", "bfloat16", "data_types", "zero_optimization", "checkpoint", "compile"),
    *("tensor_parallel", "pipeline", "amp", "torch_autocast", "activation_checkpointing", "flops_profiler", "aio"),
)
_NUMBERS = (
    *((f"train_{name}", int, "an integer >= 1") for name in ("batch_size", "micro_batch_size_per_gpu")),
    ("gradient_accumulation_steps", int, "an integer >= 1"),
    ("gradient_clipping", int | float, "a number >= 0"),
    ("tensor_parallel.autotp_size", int, "an integer >= 0"),
)
"""Key, type and what is accepted: DeepSpeed compares them with numbers without a look at their types."""
_SWITCHES = (
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler.enabled", "prescale_gradients"),
    *("disable_allgather", "dataloader_drop_last", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
"""Keys that are true or false, to which DeepSpeed takes ``"false"`` for true. It has more, in blocks of its own."""
_CHOICES = {
    "communication_data_type": ("fp16", "bf16", "fp32"),
    "checkpoint.tag_validation": ("Ignore", "Warn", "Fail"),
}
"""Names that DeepSpeed takes in upper or lower case."""
_UNSET = ("bf16", "bfloat16", "aio", *(key for key, kind, _ in _NUMBERS if kind is int))
"""Keys that may be null, which means to DeepSpeed that they are not given."""
_MODELS = ("zero_optimization", "fp16", "bf16", "bfloat16", "tensor_parallel", "compile")
"""Blocks in which DeepSpeed drops what is "auto"."""
_INNER = (
    "optimizer.params",
    "scheduler.params",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)


def as_read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without comments and what DeepSpeed reads as not given: null of some keys, and "auto", which
    programs on top of it fill in."""

    def without_auto(value: Any) -> Any:
        return {k: without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, Mapping) else value

    config = without_comments(config)
    given = {key: value for key, value in config.items() if value is not None or key not in _UNSET}
    return given | {key: without_auto(given[key]) for key in _MODELS if key in given}


def wrong_types(config: Mapping[str, Any]) -> list[str]:
    """One line for each value of a wrong kind."""
    wrong = [key for key in _BLOCKS if key in config and not isinstance(config[key], Mapping)]
    inner = {key: look_up(config, key) for key in _INNER}
    wrong += [key for key, value in inner.items() if value is not None and not isinstance(value, Mapping)]
    problems = [
        f"{key}: got {json.dumps(look_up(config, key), default=str)}, accepted: an object with its settings"
        for key in wrong
    ]
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage: got {json.dumps(stage, default=str)}, accepted: 0, 1, 2 or 3")
    for key, kind, accepted in _NUMBERS:
        value = look_up(config, key)
        wanted = key in config or value is not None
        least = 1 if accepted.endswith("1") else 0
        if wanted and (isinstance(value, bool) or not isinstance(value, kind) or not value >= least):
            problems.append(f"{key}: got {json.dumps(value, default=str)}, accepted: {accepted}")
    steps = config.get("steps_per_print")  # infinity, as Accelerate has it, is never
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int | float) or steps == 0):
        problems.append(f"steps_per_print: got {json.dumps(steps, default=str)}, accepted: a number but 0, or null")
    for key in (*_SWITCHES, *_switches_of_models()):
        block, _, name = key.rpartition(".")
        owner = config.get(block) if block else config
        value = owner.get(name, False) if isinstance(owner, Mapping) else False
        may_be_null = key in (*_SWITCHES, *_switches_of_models(null=True)) and key != "wall_clock_breakdown"
        if isinstance(value, str) or value not in (True, False, *([None] if may_be_null else [])):
            problems.append(f"{key}: got {json.dumps(value, default=str)}, accepted: true or false")
    for key, choices in _CHOICES.items():
        value = look_up(config, key)
        if value is not None and str(value).lower() not in map(str.lower, choices):
            accepted = ", ".join(map(json.dumps, choices))
            problems.append(f"{key}: got {json.dumps(value, default=str)}, accepted: {accepted}")
    return [*problems, *_wrong_dtype(config), *wrong_schedule(config), *_refused_by_models(config, problems)]


def _refused_by_models(config: Mapping[str, Any], before: list[str]) -> Iterator[str]:
    """What DeepSpeed's classes for blocks do not take, if no line before is about it, nor ``unknown_keys``."""
    told = {line.partition(":")[0] for line in before}
    for block, model in models().items():
        given = config.get(block)
        try:
            model.model_validate(dict(given)) if isinstance(given, Mapping) else None
        except ValidationError as error:
            for one in error.errors(include_url=False):
                key = ".".join([block, *(str(part) for part in one["loc"])])
                if one["loc"] and one["type"] != "extra_forbidden" and key not in told:
                    value = json.dumps(one["input"], default=str)
                    yield f"{key}: got {value}, accepted: {one['msg'].replace('Input should be ', '')}"


@functools.cache
def _switches_of_models(null: bool = False) -> tuple[str, ...]:
    """Keys of DeepSpeed's blocks that are true or false; ``null``: or null. It reads ``"true"``, and 1, as true."""
    kinds = ({bool, type(None)},) if null else ({bool}, {bool, type(None)})
    return tuple(
        f"{block}.{field.alias or name}"
        for block, model in models().items()
        for name, field in model.model_fields.items()
        if {*(get_args(field.annotation) or (field.annotation,))} in kinds
    )


def _wrong_dtype(config: Mapping[str, Any]) -> list[str]:
    from deepspeed.runtime.config import DtypeEnum

    value = look_up(config, "data_types.grad_accum_dtype")
    try:
        DtypeEnum(value) if value is not None else None
    except ValueError:
        given = json.dumps(value, default=str)
        return [f'data_types.grad_accum_dtype: got {given}, accepted: "fp32", "fp16" or "bf16"']
    return []
