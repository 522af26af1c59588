"""Names that are nearly "coat" or "CoatAdamW", and keys of the block in places where nothing reads them.

These are looked for in every configuration, with a block or without: a misspelt name must not silently disable
compression. Keys that are merely unknown are looked for beside a block or CoatAdamW only (``schema.py``).
"""

from __future__ import annotations

import contextlib
import difflib
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


def misspellings(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Iterator[Problem]:
    """What is nearly right: the key, and what was probably meant. The block's own name is checked where it is read,
    by ``CoatConfig.from_deepspeed``.

    Args:
        config: the DeepSpeed configuration.
        optimizer: the one that is given beside it; with a CoatAdamW, DeepSpeed does not look at ``optimizer.type``.
    """
    config = without_comments(config)
    named = look_up(config, "optimizer.type")
    for owner, key, value in _entries("", config):
        name = f"{owner}{key}"
        if owner and isinstance(value, Mapping) and (key == "coat" or misspells_coat(key, {key: value})):
            yield Problem(name, 'unknown key (did you mean "coat"?)', "at the top level")
        elif owner in ("", "optimizer.") and (meant := _key_of_the_block(key, value)):
            yield Problem(name, f'unknown key (did you mean "coat.{meant}"?)', 'in the "coat" block')
        # Another optimizer's params may have options like ours: only names that nothing else has.
        elif owner == "optimizer.params." and named != "CoatAdamW" and (meant := _distinct(key)):
            accepted = 'in the "coat" block, or here with "type": "CoatAdamW"'
            yield Problem(name, f'unknown key (did you mean "coat.{meant}"?)', accepted)
        elif not isinstance(optimizer, CoatAdamW) and (key == "type" or owner == "optimizer." or name == "optimizer"):
            letters = _letters(value) if name == "optimizer.type" and isinstance(value, str) else ""
            near = difflib.SequenceMatcher(None, letters, "coatadamw").ratio() > 0.8 or letters.startswith("coat")
            misplaced = name != "optimizer.type" or isinstance(value, list | tuple)
            if near and value != "CoatAdamW":
                yield Problem(name, f'{got(value)} (did you mean "CoatAdamW"?)', '"CoatAdamW"')
            elif misplaced and "CoatAdamW" in (value if isinstance(value, list | tuple) else [value]):
                yield Problem(name, got(value), 'the name alone, as "optimizer.type"')


def _entries(owner: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """All keys outside of the block, each with what stands before it and its value."""
    for key, value in config.items():
        if owner or key != "coat":
            yield owner, str(key), value
            yield from _entries(f"{owner}{key}.", value) if isinstance(value, Mapping) and key != "coat" else ()


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
