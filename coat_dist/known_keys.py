"""Misspelt and misplaced keys, and values of a wrong type, of a DeepSpeed configuration.

Names that are nearly "coat" or "CoatAdamW", and keys of the block outside of it, are looked for in
every configuration: a misspelt name must not silently disable compression. Beside a block or
CoatAdamW all keys are compared with those that the installed DeepSpeed reads: it ignores most keys
that it does not know, and trains without the setting.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from .config import ActivationConfig, OptimizerConfig, letters_of, misspells_coat
from .config_errors import Problem, got
from .optim import CoatAdamW

Entries = Collection[tuple[str, str, Any]]
"""``Settings.entries``: what stands before a key, the key, the value."""
_READ_BY_KEY = (
    "optimizer",
    "scheduler",
    "data_types",
    "checkpoint",
    "torch_autocast",
    "activation_checkpointing",
    "flops_profiler",
)
"""Blocks that DeepSpeed reads key by key."""
_READ_ELSEWHERE = (
    "data_parallel_size",  # by deepspeed.initialize
    "sequence_parallel_size",
    "inference",  # by transformers
    "comms_config",  # by nothing; LLaMA-Factory's files have these two
    "monitor_config",
    "zero_optimization.reduce_bucket_size",  # by nothing; TRL's reference models have these three
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
)
"""Top-level keys that other code than DeepSpeed's class of configurations reads."""
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
    """Types of the keys that the installed DeepSpeed reads, by block; "" is the top level."""
    from deepspeed.runtime.config import DeepSpeedConfig

    blocks = {name: _RecordingConfig({}) for name in _READ_BY_KEY}
    for name in ("optimizer", "scheduler"):
        blocks[name]["type"] = ""
    top = _RecordingConfig({"train_micro_batch_size_per_gpu": 1, **blocks})
    DeepSpeedConfig(top)
    found = {"": top.asked} | {name: block.asked for name, block in blocks.items()}
    found[""] |= dict.fromkeys(_READ_ELSEWHERE, object)
    return found


def defaults_of_coat_adamw() -> dict[str, Any]:
    """CoatAdamW's options and their defaults."""
    known = inspect.signature(CoatAdamW.__init__).parameters
    return {name: p.default for name, p in known.items() if name not in ("self", "params")}


def unknown(entries: Entries, compressed: bool) -> Iterator[Problem]:
    """Keys that neither DeepSpeed nor this project reads, and values of a wrong type.
    ``compressed``: the configuration names CoatAdamW.
    """
    known = {**known_keys()}
    if compressed:
        known["optimizer.params"] = dict.fromkeys([*defaults_of_coat_adamw(), *OF_ADAM], object)
    for owner, key, value in entries:
        fields, name = known.get(owner.removesuffix(".")), f"{owner}{key}"
        if fields is None:
            continue
        if key not in fields:
            accepted = ", ".join(sorted(fields)) if owner else 'DeepSpeed\'s keys, "coat"'
            meant = _suggestion(owner, key, fields)
            yield Problem(name, f"unknown key{meant}", f'{accepted}, a comment "_{key}"')
        elif fields[key] is bool and (isinstance(value, str) or value not in (True, False, None)):
            yield Problem(name, got(value), "true or false")


def _suggestion(owner: str, key: str, fields: Iterable[str]) -> str:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    places = {one: f"zero_optimization.{one}" for one in DeepSpeedZeroConfig.model_fields}
    for place, keys in _PLACES:
        places |= {one: f"{place}.{one}" for one in keys}
    written = key.lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(written, sorted(fields), 1)
    meant = places.get(key) or (f"{owner}{close[0]}" if close else None)
    return f' (did you mean "{meant}"?)' if meant else ""


_COAT_ONLY_KEYS = {
    letters_of(key.partition(".")[2]): key
    for key in (
        "optimizer.first_moment",
        "optimizer.second_moment",
        "optimizer.stochastic_rounding",
        "optimizer.master_weights",
        "activation.forward_scales",
        "activation.grad_format",
        "activation.fp8_gather",
        "activation.tp_invariant",
        "activation.bf16_layers",
    )
}
"""Keys that only the block has, by their letters; no other program's configuration is refused."""


def misspelt(entries: Entries) -> Iterator[Problem]:
    """Names that are nearly the block's or CoatAdamW's, or in a wrong place. A top-level key that
    is nearly "coat" is found where the block is read (``CoatConfig.from_deepspeed``).
    """
    compressed = ("optimizer.", "type", "CoatAdamW") in entries
    for owner, key, value in entries:
        name = f"{owner}{key}"
        near = difflib.get_close_matches(letters_of(key), _COAT_ONLY_KEYS, 1, 0.9)
        if owner and isinstance(value, Mapping) and (key == "coat" or misspells_coat(key, value)):
            yield Problem(name, 'unknown key (did you mean "coat"?)', "at the top level")
        elif near and not (compressed and owner == "optimizer.params."):
            meant = f"coat.{_COAT_ONLY_KEYS[near[0]]}"
            yield Problem(name, f'unknown key (did you mean "{meant}"?)', 'in the "coat" block')
        elif isinstance(value, str) and (key == "type" or name in ("optimizer", "optimizer.name")):
            yield from _misspelt_type(name, value)


def _misspelt_type(name: str, value: str) -> Iterator[Problem]:
    letters = letters_of(value)
    likeness = difflib.SequenceMatcher(None, letters, "coatadamw").ratio()
    right = (name, value) == ("optimizer.type", "CoatAdamW")
    if not right and (letters.startswith("coat") or likeness > 0.8):
        meant = "" if value == "CoatAdamW" else ' (did you mean "CoatAdamW"?)'
        elsewhere = "" if name == "optimizer.type" else ' in "optimizer.type" alone'
        yield Problem(name, got(value) + meant, f'"CoatAdamW"{elsewhere}')
