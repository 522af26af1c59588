"""Names that are nearly "coat" or "CoatAdamW", and keys of the block in places where nobody reads them.

These are looked for in every configuration, with a block or without: what was meant to be compressed must not train
uncompressed. Keys that are merely unknown are looked for beside a block or CoatAdamW only (``known_keys.py``).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ..config import ActivationConfig, CoatConfigError
from ..optim import CoatAdamW

__all__ = ["check_names"]

_OPTIMIZER = {"first_moment", "second_moment", "stochastic_rounding", "master_weights"}
_ACTIVATION = {"forward_scales", "grad_format", "fp8_gather", "tp_invariant", "bf16_layers"}
"""Keys that only the block has, so that no other program's configuration is refused."""


def check_names(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Refuse what is nearly right. The block's own name is checked where it is read, by ``CoatConfig.from_deepspeed``.

    Args:
        config: the DeepSpeed configuration.
        optimizer: the one that is given beside it; with a CoatAdamW, DeepSpeed does not look at ``optimizer.type``.

    Raises:
        CoatConfigError: names the key and what was probably meant.
    """
    problems = [
        f'{key}: unknown key (did you mean {json.dumps(meant)}?), accepted: in the "coat" block'
        for key, meant in _misplaced(config)
    ]
    block = config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(optimizer, CoatAdamW) and isinstance(name, str) and _misspells_coat_adamw(name):
        problems.append(f'optimizer.type: got {json.dumps(name)} (did you mean "CoatAdamW"?), accepted: "CoatAdamW"')
    if problems:
        raise CoatConfigError("\n".join(problems))


def _misspells_coat_adamw(name: str) -> bool:
    letters = "".join(c for c in name.lower() if c.isalnum())
    if name == "CoatAdamW":
        return False
    return letters.startswith("coat") or difflib.SequenceMatcher(None, letters, "coatadamw").ratio() > 0.8


def _misplaced(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys of the block at the top level or in DeepSpeed's ``optimizer``, and where they belong."""
    found = []
    for prefix, block in (("", config), ("optimizer.", config.get("optimizer"))):
        for key, value in block.items() if isinstance(block, Mapping) else ():
            if key in _OPTIMIZER:
                found.append((f"{prefix}{key}", f"coat.optimizer.{key}"))
            elif key in _ACTIVATION:
                found.append((f"{prefix}{key}", f"coat.activation.{key}"))
            elif key == "activation" and isinstance(value, Mapping) and value:
                if {*value} <= {*ActivationConfig.model_fields}:
                    found.append((f"{prefix}{key}", "coat.activation"))
            elif prefix and key == "coat":
                found.append((f"{prefix}{key}", "coat"))
    return found
