"""Misspelt and misplaced keys, and switches and numbers that are written as text.

Names that are nearly "coat" or "CoatAdamW", and keys of the block outside of it, are looked for in
every configuration: a misspelt name must not silently disable compression. Beside a block or
CoatAdamW all keys are compared with those that the installed DeepSpeed reads: it ignores most keys
that it does not know, and trains without the setting.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from ...config import (
    ActivationConfig,
    OptimizerConfig,
    Problem,
    look_up,
    misspells_coat,
    without_comments,
)
from ...config_errors import got
from ...optim import CoatAdamW

__all__ = ["OF_ADAM", "defaults_of_coat_adamw", "known_keys", "misspelt", "unknown"]

_READ_BY_KEY = (
    *(
        "optimizer",
        "scheduler",
        "data_types",
        "checkpoint",
        "torch_autocast",
        "activation_checkpointing",
    ),
    "flops_profiler",
)
"""Blocks that DeepSpeed reads key by key."""
_MODELS = {"zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config"}
"""Blocks that are classes of pydantic, and what DeepSpeed's configuration calls them."""
_ELSEWHERE = {
    "coat",
    *("data_parallel_size", "sequence_parallel_size"),  # read by deepspeed.initialize
    "inference",  # read by transformers
    *("comms_config", "monitor_config"),  # read by nothing; LLaMA-Factory's files have them
}
"""Top-level keys that are read by other code than DeepSpeed's class of configurations, or do no
harm.
"""
OF_ADAM = ("torch_adam", "adam_w_mode")
"""Keys by which DeepSpeed chooses among its Adams; templates of other programs have them."""
_PLACES: tuple[tuple[str, Iterable[str]], ...] = (
    ("coat.activation", ActivationConfig.model_fields),
    ("coat.optimizer", OptimizerConfig.model_fields),
    ("optimizer.params", ("lr", "betas", "eps", "weight_decay")),
    ("coat", ("activation",)),
)
"""Keys that are easily put into another block; of equal names the last place counts."""


class _RecordingConfig(dict):
    """A configuration that notes the keys it is asked for, and the types of their defaults."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: dict[str, type] = {}

    def __copy__(self) -> _RecordingConfig:
        return self

    def __contains__(self, key: Any) -> bool:
        self.asked.setdefault(key, object)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.setdefault(key, object)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked[key] = type(default)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # DeepSpeed writes `key in config.keys()`


@functools.cache
def known_keys() -> dict[str, dict[str, type]]:
    """Types of the keys that the installed DeepSpeed reads, by block, "" being the top level."""
    from deepspeed.runtime.config import DeepSpeedConfig

    typed = ("optimizer", "scheduler")
    blocks = {
        name: _RecordingConfig({"type": ""} if name in typed else {}) for name in _READ_BY_KEY
    }
    top = _RecordingConfig({"train_micro_batch_size_per_gpu": 1, **blocks})
    made = DeepSpeedConfig(top)
    found = {"": top.asked} | {name: block.asked for name, block in blocks.items()}
    found["optimizer"]["params"] = dict
    found[""] |= dict.fromkeys(_ELSEWHERE, object) | dict.fromkeys(
        (*_READ_BY_KEY, *_MODELS, "tensor_parallel"), dict
    )
    for name, attribute in _MODELS.items():
        found[name] = {}
        for key, field in type(getattr(made, attribute)).model_fields.items():
            switch = {*(get_args(field.annotation) or (field.annotation,))} <= {bool, type(None)}
            found[name] |= dict.fromkeys((key, field.alias or key), bool if switch else object)
    return found


def defaults_of_coat_adamw() -> dict[str, Any]:
    """CoatAdamW's options and their defaults."""
    known = inspect.signature(CoatAdamW.__init__).parameters
    return {name: p.default for name, p in known.items() if name not in ("self", "params")}


def unknown(config: Mapping[str, Any], compressed: bool) -> Iterator[Problem]:
    """Keys that neither DeepSpeed nor this project reads, and values of a wrong type, in a
    configuration as DeepSpeed reads it. ``compressed``: CoatAdamW is named in it.
    """
    known: dict[str, Mapping[str, type]] = {**known_keys()}
    if compressed:
        known["optimizer.params"] = dict.fromkeys([*defaults_of_coat_adamw(), *OF_ADAM], object)
    for owner, fields in known.items():
        block = look_up(config, owner) if owner else config
        for key, value in block.items() if isinstance(block, Mapping) else ():
            name = f"{owner}.{key}" if owner else str(key)
            if key not in fields:
                accepted = 'DeepSpeed\'s keys, "coat"' if not owner else ", ".join(sorted(fields))
                meant = _suggestion(owner, str(key), fields)
                yield Problem(name, f"unknown key{meant}", f'{accepted}, a comment "_{key}"')
            elif fields[key] is dict and not isinstance(value, Mapping):
                yield Problem(name, got(value), "an object with its settings")
            elif fields[key] is bool and (
                isinstance(value, str) or value not in (True, False, None)
            ):
                yield Problem(name, got(value), "true or false")


def _suggestion(owner: str, key: str, fields: Iterable[str]) -> str:
    places = {one: f"zero_optimization.{one}" for one in known_keys()["zero_optimization"]}
    places |= {one: f"{place}.{one}" for place, keys in _PLACES for one in keys}
    close = difflib.get_close_matches(
        key.lower().replace("-", "_").replace(" ", "_"), sorted(fields), 1
    )
    near = f"{owner}.{close[0]}".removeprefix(".") if close else None
    meant = places.get(key, near)
    return f' (did you mean "{meant}"?)' if meant else ""


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_COAT_ONLY_KEYS = {
    _letters(key.partition(".")[2]): key
    for key in (
        *("optimizer.first_moment", "optimizer.second_moment", "optimizer.stochastic_rounding"),
        *("optimizer.master_weights", "activation.forward_scales", "activation.grad_format"),
        *("activation.fp8_gather", "activation.tp_invariant", "activation.bf16_layers"),
    )
}
"""Keys that only the block has, so that no other program's configuration is refused, by their
letters.
"""


def misspelt(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Names that are nearly the block's or CoatAdamW's, or in a wrong place. A top-level key that
    is nearly "coat" is found where the block is read (``CoatConfig.from_deepspeed``).
    """
    config = without_comments(config)
    compressed = look_up(config, "optimizer.type") == "CoatAdamW"
    for owner, key, value in _entries("", config):
        name = f"{owner}{key}"
        near = difflib.get_close_matches(_letters(key), _COAT_ONLY_KEYS, 1, 0.9)
        if owner and isinstance(value, Mapping) and (key == "coat" or misspells_coat(key, value)):
            yield Problem(name, 'unknown key (did you mean "coat"?)', "at the top level")
        elif near and not (compressed and owner == "optimizer.params."):
            yield Problem(
                name,
                f'unknown key (did you mean "coat.{_COAT_ONLY_KEYS[near[0]]}"?)',
                'in the "coat" block',
            )
        elif isinstance(value, str) and (key == "type" or name in ("optimizer", "optimizer.name")):
            letters = _letters(value)
            close = (
                letters.startswith("coat")
                or difflib.SequenceMatcher(None, letters, "coatadamw").ratio() > 0.8
            )
            if close and (name, value) != ("optimizer.type", "CoatAdamW"):
                meant = "" if value == "CoatAdamW" else ' (did you mean "CoatAdamW"?)'
                elsewhere = "" if name == "optimizer.type" else ' in "optimizer.type" alone'
                yield Problem(name, got(value) + meant, f'"CoatAdamW"{elsewhere}')


def _entries(owner: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """All keys outside of the block, each with what stands before it and its value."""
    for key, value in config.items():
        if owner or key != "coat":
            yield owner, str(key), value
            yield from (
                _entries(f"{owner}{key}.", value)
                if isinstance(value, Mapping) and key != "coat"
                else ()
            )
