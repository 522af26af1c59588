"""What is no object, no stage or no number in a DeepSpeed configuration, before anything is looked up in it.

DeepSpeed would end in an AttributeError or TypeError that names no key, some of them in the first step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..config import look_up

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
    """The configuration without what DeepSpeed reads as not given: null of some keys, and "auto", which programs on top
    of it fill in."""

    def without_auto(value: Any) -> Any:
        return {k: without_auto(v) for k, v in value.items() if v != "auto"} if isinstance(value, Mapping) else value

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
    return problems
