"""Keys that nobody would read: DeepSpeed passes over most that it does not know, and trains without the setting.

Which it knows is asked of DeepSpeed itself: it is given a configuration that notes what it is asked for.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ..config import ActivationConfig, OptimizerConfig
from .refusal_rules import RULES

__all__ = ["models", "unknown_keys"]

_BLOCKS = (
    *("optimizer", "scheduler", "data_types", "checkpoint", "torch_autocast", "activation_checkpointing"),
    "flops_profiler",
)
"""Blocks that DeepSpeed reads key by key. It refuses unknown keys of most others itself."""
_MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config",
}
"""Blocks whose unknown keys it refuses without a word on where they belong, and what its configuration calls them."""
_ELSEWHERE = {
    "coat",
    *("data_parallel_size", "sequence_parallel_size"),  # read by deepspeed.initialize
    "inference",  # read by transformers
    *("comms_config", "monitor_config"),  # read by nothing; LLaMA-Factory's files have them
}
"""Top-level keys that are read by other code than DeepSpeed's class of configurations, or do no harm."""


class _Asked(dict):
    """A configuration that notes the keys it is asked for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def __copy__(self) -> _Asked:
        return self

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # DeepSpeed writes `key in config.keys()`


@functools.cache
def _asked() -> tuple[dict[str, frozenset[str]], dict[str, type[BaseModel]]]:
    """The keys that the installed DeepSpeed reads, by block, "" being the top level; and the classes of ``_MODELS``."""
    from deepspeed.runtime.config import DeepSpeedConfig

    blocks = {name: _Asked({"type": ""} if name in ("optimizer", "scheduler") else {}) for name in _BLOCKS}
    top = _Asked({"train_micro_batch_size_per_gpu": 1, **blocks})
    made = DeepSpeedConfig(top)
    known = {name: frozenset(block.asked) for name, block in blocks.items()}
    classes = {name: type(getattr(made, attribute)) for name, attribute in _MODELS.items()}
    for name, model in classes.items():
        fields = model.model_fields
        known[name] = frozenset({*fields, *(field.alias for field in fields.values() if field.alias)})
    refused = (rule.key.partition(".") for rule in RULES)  # with a reason, which says more
    known["zero_optimization"] |= {key for owner, _, key in refused if owner == "zero_optimization"}
    return {"": frozenset(top.asked | _ELSEWHERE), **known}, classes


def _known() -> dict[str, frozenset[str]]:
    return _asked()[0]


def models() -> dict[str, type[BaseModel]]:
    """DeepSpeed's classes for its blocks of which there is one, by the name of the block."""
    return _asked()[1]


@functools.cache
def _belongs_to() -> dict[str, str]:
    """For keys of the blocks that are easily put a level too high: the dotted key."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    owners = {
        "zero_optimization": DeepSpeedZeroConfig.model_fields,
        "coat.activation": ActivationConfig.model_fields,
        "coat.optimizer": OptimizerConfig.model_fields,
        "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
        "coat": ("activation",),
    }
    return {key: f"{owner}.{key}" for owner, keys in owners.items() for key in keys}


def unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """One line for each key that neither DeepSpeed nor this project reads, of the top level, ``_BLOCKS``, ``_MODELS``.

    Args:
        config: without comments (``json_types.as_read``).
    """
    for owner, known in _known().items():
        block = config if owner == "" else config.get(owner)
        for key in block if isinstance(block, Mapping) else ():
            if key in known:
                continue
            close = difflib.get_close_matches(str(key).lower().replace("-", "_").replace(" ", "_"), sorted(known), 1)
            near = (f"{owner}." if owner else "") + close[0] if close else None
            meant = _belongs_to().get(str(key), near)
            hint = f' (did you mean "{meant}"?)' if meant else ""
            name = f"{owner}.{key}" if owner else key
            ignored = "," if owner in _MODELS else ", which DeepSpeed would ignore;"
            accepted = {"": 'DeepSpeed\'s keys, "coat"', "zero_optimization": "DeepSpeed's keys of it"}
            keys = accepted.get(owner) or ", ".join(sorted(known))
            yield f'{name}: unknown key{hint}{ignored} accepted: {keys}, a comment "_{key}"'
