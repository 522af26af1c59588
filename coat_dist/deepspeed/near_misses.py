"""Names that are nearly "coat" or "CoatAdamW", and keys of the block in places where nobody reads them.

These are looked for in every configuration, with a block or without: what was meant to be compressed must not train
uncompressed. Keys that are merely unknown are looked for beside a block or CoatAdamW only (``known_keys.py``).
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from ..config import ActivationConfig, CoatConfigError, OptimizerConfig, look_up, misspells_coat, without_comments
from ..optim import CoatAdamW

__all__ = ["check_names", "wrong_names"]


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


def check_names(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse what is nearly right.

    Raises:
        CoatConfigError: what :func:`wrong_names` says.
    """
    if problems := wrong_names(config, optimizer):
        raise CoatConfigError("\n".join(problems))


def wrong_names(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """One line for each name that is nearly right: the key, and what was probably meant. The block's own name is
    checked where it is read, by ``CoatConfig.from_deepspeed``.

    Args:
        config: the DeepSpeed configuration.
        optimizer: the one that is given beside it; with a CoatAdamW, DeepSpeed does not look at ``optimizer.type``.
    """
    config = without_comments(config)
    problems = [
        f"{key}: unknown key (did you mean {json.dumps(meant)}?), accepted: {where}"
        for key, meant, where in (*_misplaced(config), *_nested("", config))
    ]
    if not isinstance(optimizer, CoatAdamW):
        problems += _misnamed_optimizer(config)
    return problems


def _misspells_coat_adamw(name: Any) -> bool:
    if name == "CoatAdamW" or not isinstance(name, str):
        return False
    letters = _letters(name)
    return letters.startswith("coat") or difflib.SequenceMatcher(None, letters, "coatadamw").ratio() > 0.8


def _misnamed_optimizer(config: Mapping[str, Any]) -> Iterator[str]:
    """CoatAdamW by nearly its name, or in a place where DeepSpeed does not look for an optimizer's name."""
    block = config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if _misspells_coat_adamw(name):
        yield f'optimizer.type: got {json.dumps(name)} (did you mean "CoatAdamW"?), accepted: "CoatAdamW"'
    elsewhere = {"optimizer": block, "optimizer.type": name} if name != "CoatAdamW" else {}
    if isinstance(block, Mapping):
        elsewhere |= {f"optimizer.{key}": value for key, value in block.items() if key != "type"}
    for key, value in config.items():
        if key != "optimizer" and isinstance(value, Mapping):
            elsewhere[f"{key}.type"] = value.get("type")
    for key, value in elsewhere.items():
        if "CoatAdamW" in (value if isinstance(value, list | tuple) else [value]):
            accepted = {
                "optimizer": 'an object with its settings, "type" among them',
                "optimizer.type": 'a name, not a list: "CoatAdamW"',
            }.get(key, 'as "optimizer.type"')
            yield f"{key}: got {json.dumps(value)}, accepted: {accepted}"


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
    """The block inside another one, where nobody reads it."""
    for owner, block in config.items():
        if isinstance(block, Mapping) and owner != "coat":
            for key in block:
                if isinstance(block[key], Mapping) and (key == "coat" or misspells_coat(key, block)):
                    yield f"{prefix}{owner}.{key}", "coat", "at the top level"
            yield from _nested(f"{prefix}{owner}.", block)
