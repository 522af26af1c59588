"""Keys that the installed DeepSpeed reads, with their types: asked of DeepSpeed itself.

It passes over most keys that it does not know, and trains without the setting. So its class of configurations is given
one that notes which keys it is asked for, and with which default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
from pydantic import BaseModel, ValidationError

from ...config import ActivationConfig, OptimizerConfig, Problem, look_up
from ...config_errors import got
from ...optim import CoatAdamW

__all__ = ["OF_ADAM", "check_blocks", "check_keys", "defaults_of_coat_adamw", "is_number", "schedule_class"]

_READ_BY_KEY = (
    *("optimizer", "scheduler", "data_types", "checkpoint", "torch_autocast", "activation_checkpointing"),
    "flops_profiler",
)
"""Blocks that DeepSpeed reads key by key. It refuses unknown keys of most others itself."""
_MODELS = {"zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config"}
"""Blocks that are classes of pydantic, and what DeepSpeed's configuration calls them."""
_ELSEWHERE = {
    "coat",
    *("data_parallel_size", "sequence_parallel_size"),  # read by deepspeed.initialize
    "inference",  # read by transformers
    *("comms_config", "monitor_config"),  # read by nothing; LLaMA-Factory's files have them
}
"""Top-level keys that are read by other code than DeepSpeed's class of configurations, or do no harm."""
OF_ADAM = ("torch_adam", "adam_w_mode")
"""Keys by which DeepSpeed chooses among its Adams; templates of other programs have them."""


class _Asked(dict):
    """A configuration that notes the keys it is asked for, and their defaults."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: dict[str, Any] = {}

    def __copy__(self) -> _Asked:
        return self

    def __contains__(self, key: Any) -> bool:
        self.asked.setdefault(key, None)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # DeepSpeed writes `key in config.keys()`


@functools.cache
def _asked() -> tuple[dict[str, dict[str, type]], dict[str, type[BaseModel]]]:
    """Types of the keys that DeepSpeed reads, by block, "" being the top level; and the classes of ``_MODELS``."""
    from deepspeed.runtime.config import DeepSpeedConfig

    blocks = {name: _Asked({"type": ""} if name in ("optimizer", "scheduler") else {}) for name in _READ_BY_KEY}
    top = _Asked({"train_micro_batch_size_per_gpu": 1, **blocks})
    made = DeepSpeedConfig(top)
    found = {name: {key: type(d) for key, d in asked.asked.items()} for name, asked in {"": top, **blocks}.items()}
    found[""] |= dict.fromkeys(_ELSEWHERE, object) | dict.fromkeys((*_READ_BY_KEY, *_MODELS, "tensor_parallel"), dict)
    classes = {name: type(getattr(made, attribute)) for name, attribute in _MODELS.items()}
    for name, model in classes.items():
        found[name] = {}
        for key, described in model.model_fields.items():
            switch = {*(get_args(described.annotation) or (described.annotation,))} <= {bool, type(None)}
            found[name] |= dict.fromkeys((key, described.alias or key), bool if switch else object)
    return found, classes


def defaults_of_coat_adamw() -> dict[str, Any]:
    """CoatAdamW's options and their defaults."""
    known = inspect.signature(CoatAdamW.__init__).parameters
    return {name: p.default for name, p in known.items() if name not in ("self", "params")}


def schedule_class(name: Any, stage: int) -> type | None:
    """What DeepSpeed makes of a name: a schedule of its own, or else one of torch's, which take no ZeRO optimizer."""
    from deepspeed.runtime import lr_schedules

    modules = (lr_schedules,) if stage else (lr_schedules, torch.optim.lr_scheduler)
    found = (getattr(module, name, None) for module in modules if isinstance(name, str))
    classes = (c for c in found if isinstance(c, type) and "optimizer" in inspect.signature(c).parameters)
    return next(classes, None)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_blocks(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What DeepSpeed reads as an object, and is none."""
    for key, kind in _asked()[0][""].items():
        if kind is dict and key in config and not isinstance(config[key], Mapping):
            yield Problem(key, got(config[key]), "an object with its settings")


def check_keys(config: Mapping[str, Any], compressed: bool, stage: int) -> Iterator[Problem]:
    """Keys that neither DeepSpeed nor this project reads, and values of a wrong type.

    Args:
        config: as DeepSpeed reads it, without wrong blocks.
        compressed: CoatAdamW is named in it.
        stage: of ZeRO.
    """
    known, classes = dict(_asked()[0]), _asked()[1]
    if compressed:
        known["optimizer.params"] = dict.fromkeys([*defaults_of_coat_adamw(), *OF_ADAM], object)
    if schedule := schedule_class(look_up(config, "scheduler.type"), stage):
        parameters = inspect.signature(schedule).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            known["scheduler.params"] = {
                p.name: p.annotation if p.annotation in (int, float) else type(p.default)
                for p in parameters
                if p.name != "optimizer"
            }
    for owner, fields in known.items():
        block = look_up(config, owner) if owner else config
        for key, value in block.items() if isinstance(block, Mapping) else ():
            name = f"{owner}.{key}" if owner else str(key)
            if key not in fields:
                ignored = 'DeepSpeed\'s keys, "coat"' if not owner else ", ".join(sorted(fields))
                yield Problem(name, f"unknown key{_meant(owner, str(key), fields)}", f'{ignored}, a comment "_{key}"')
            elif fields[key] is bool and (isinstance(value, str) or value not in (True, False, None)):
                yield Problem(name, got(value), "true or false")
            elif fields[key] in (int, float) and value not in (None, "auto") and not is_number(value):
                yield Problem(name, got(value), "a number")
    for owner, model in classes.items():
        try:
            model.model_validate(dict(config.get(owner) or {}))
        except ValidationError as error:
            for one in error.errors(include_url=False):
                if one["loc"] and one["type"] != "extra_forbidden":
                    key = ".".join([owner, *map(str, one["loc"])])
                    yield Problem(key, got(one["input"]), one["msg"].replace("Input should be ", ""))


@functools.cache
def _belongs_to() -> dict[str, str]:
    """For keys of blocks that are easily put a level too high: the dotted key."""
    owners: dict[str, Iterable[str]] = {
        "zero_optimization": _asked()[0]["zero_optimization"],
        "coat.activation": ActivationConfig.model_fields,
        "coat.optimizer": OptimizerConfig.model_fields,
        "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
        "coat": ("activation",),
    }
    return {key: f"{owner}.{key}" for owner, keys in owners.items() for key in keys}


def _meant(owner: str, key: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_").replace(" ", "_"), sorted(fields), 1)
    near = f"{owner}.{close[0]}".removeprefix(".") if close else None
    meant = _belongs_to().get(key, near)
    return f' (did you mean "{meant}"?)' if meant else ""
