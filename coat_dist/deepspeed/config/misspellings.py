"""Names that are nearly "coat" or "CoatAdamW", and keys of the block in places where nothing reads them.

These are looked for in every configuration, with a block or without: a misspelt name must not silently disable
compression. Keys that are merely unknown are looked for beside a block or CoatAdamW only (``schema.py``).
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from ...config import ActivationConfig, OptimizerConfig, Problem, look_up, misspells_coat, without_comments
from ...config_errors import got
from ...optim import CoatAdamW

__all__ = ["misspellings"]


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


_DISTINCT = {
    _letters(key.partition(".")[2]): key
    for key in (
        *("optimizer.first_moment", "optimizer.second_moment", "optimizer.stochastic_rounding"),
        *("optimizer.master_weights", "activation.forward_scales", "activation.grad_format"),
        *("activation.fp8_gather", "activation.tp_invariant", "activation.bf16_layers"),
    )
}
"""Keys that only the block has, so that no other program's configuration is refused, by their letters."""


def misspellings(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> list[Problem]:
    """What is nearly right: the key, and what was probably meant. The block's own name is checked where it is read,
    by ``CoatConfig.from_deepspeed``.

    Args:
        config: the DeepSpeed configuration.
        optimizer: the one that is given beside it; with a CoatAdamW, DeepSpeed does not look at ``optimizer.type``.
    """
    config = without_comments(config)
    problems = [
        Problem(key, f"unknown key (did you mean {json.dumps(meant)}?)", where)
        for key, meant, where in (*_misplaced(config), *_nested("", config))
    ]
    return problems if isinstance(optimizer, CoatAdamW) else [*problems, *_misnamed_optimizer(config)]


def _misnamed_optimizer(config: Mapping[str, Any]) -> Iterator[Problem]:
    """CoatAdamW by nearly its name, or in a place where DeepSpeed does not look for an optimizer's name."""
    block = config.get("optimizer")
    inside = block if isinstance(block, Mapping) else {}
    name = inside.get("type")
    if name == "CoatAdamW":
        name = None
    elif isinstance(name, str):
        letters = _letters(name)
        if letters.startswith("coat") or difflib.SequenceMatcher(None, letters, "coatadamw").ratio() > 0.8:
            yield Problem("optimizer.type", f'{got(name)} (did you mean "CoatAdamW"?)', '"CoatAdamW"')
    elsewhere = {"optimizer": block, "optimizer.type": name}
    elsewhere |= {f"optimizer.{key}": value for key, value in inside.items() if key != "type"}
    others = (key for key, value in config.items() if key != "optimizer" and isinstance(value, Mapping))
    elsewhere |= {f"{key}.type": config[key].get("type") for key in others}
    for key, value in elsewhere.items():
        if "CoatAdamW" in (value if isinstance(value, list | tuple) else [value]):
            yield Problem(key, got(value), 'the name alone, as "optimizer.type"')


def _misplaced(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys of the block at the top level or in DeepSpeed's ``optimizer``; in the ``params`` of another optimizer, which
    may have options like ours, only names that nothing else has. What was meant, and where it belongs."""
    for prefix, block in (("", config), ("optimizer.", config.get("optimizer"))):
        for key, value in block.items() if isinstance(block, Mapping) else ():
            if meant := _key_of_the_block(str(key), value):
                yield f"{prefix}{key}", f"coat.{meant}", 'in the "coat" block'
    params = look_up(config, "optimizer.params")
    for key in params if isinstance(params, Mapping) and look_up(config, "optimizer.type") != "CoatAdamW" else ():
        if meant := _distinct(str(key)):
            yield f"optimizer.params.{key}", f"coat.{meant}", 'in the "coat" block, or here with "type": "CoatAdamW"'


def _distinct(key: str) -> str | None:
    near = difflib.get_close_matches(_letters(key), _DISTINCT, 1, 0.9)
    return _DISTINCT[near[0]] if near else None


def _key_of_the_block(key: str, value: Any) -> str | None:
    """The block's key that a key must mean: a name that only the block has, or nearly; or a value that only it has."""
    if meant := _distinct(key):
        return meant
    if key == "activation" and isinstance(value, Mapping):
        return "activation" if {*value} & {*ActivationConfig.model_fields} else None
    for name, model in (("optimizer", OptimizerConfig), ("activation", ActivationConfig)):
        if key in model.model_fields and key != "enabled" and isinstance(value, str | int):
            with contextlib.suppress(ValidationError):
                model.model_validate({key: value})
                return f"{name}.{key}"
    return None


def _nested(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The block inside another one, where nothing reads it."""
    for owner, block in config.items():
        if isinstance(block, Mapping) and owner != "coat":
            for key in block:
                if isinstance(block[key], Mapping) and (key == "coat" or misspells_coat(key, block)):
                    yield f"{prefix}{owner}.{key}", "coat", "at the top level"
            yield from _nested(f"{prefix}{owner}.", block)
