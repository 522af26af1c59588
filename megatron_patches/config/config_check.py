"""Looks up a ``TransformerConfig`` in the table of its fields (``fields.py``): what has to be
refused, and why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.transformer import TransformerConfig

from .fields import ACCEPTED, KNOWN


def why_not_built(config: TransformerConfig) -> str | None:
    """The first field of ``config`` that a model from ``gpt_layer_spec`` would ignore or get
    wrong, or None.
    """
    for name in ACCEPTED["built"]:
        # Without meaning in a dense model.
        of_experts = name.startswith("moe_") and config.num_moe_experts is None
        if not of_experts and (reason := _refusal(config, name, "built")) is not None:
            return f"{reason} (use Megatron's own spec)"
    for name, given in _unknown(config).items():
        return (
            f"{name}: got {given!r}, accepted: its default (a field of megatron-core that is "
            "not known here)"
        )
    return None


def why_bf16_config(config: Any) -> str | None:
    """The first field of ``config`` that asks for something that patched modules do not do, or
    None.
    """
    for name in ACCEPTED["patched"]:
        if _refusal(config, name, "patched") is not None:
            return f"config.{name}={getattr(config, name)}"
    for name, given in _unknown(config).items():
        return f"config.{name}={given} is not known here"
    return None


def check_field(config: Any, name: str, where: str) -> None:
    """Raises ValueError where a model from ``gpt_layer_spec`` does not accept this field's
    value.
    """
    if (reason := _refusal(config, name, "built")) is not None:
        raise ValueError(f"{reason} {where}")


def _refusal(config: Any, name: str, where: str) -> str | None:
    accepted = ACCEPTED[where].get(name)
    if accepted is None or not hasattr(config, name):  # older versions lack some fields
        return None
    given = getattr(config, name)
    if any(given == value or not (given or value) for value in accepted):
        return None
    return f"{name}: got {given!r}, accepted: {', '.join(map(repr, accepted))}"


def _unknown(config: Any) -> dict[str, Any]:
    """Fields of the installed Megatron's own class that the table lacks and that are not what
    they are by default.
    """
    new = [
        f.name
        for f in dataclasses.fields(TransformerConfig)
        if f.name not in KNOWN and hasattr(config, f.name)
    ]
    if not new:
        return {}
    sizes = {
        key: getattr(config, key) for key in ("num_layers", "hidden_size", "num_attention_heads")
    }
    # What is derived from other fields is not the default of the declaration.
    usual = TransformerConfig(**sizes)
    return {
        name: getattr(config, name) for name in new if getattr(config, name) != getattr(usual, name)
    }
