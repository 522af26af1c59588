"""Pydantic's errors as lines that name the key, what was given and what is accepted."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

__all__ = ["did_you_mean", "explain", "keys_of"]


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What follows an unknown name where a known one is near; else nothing."""
    near = difflib.get_close_matches(given, [*known], 1, cutoff)
    return f' (did you mean "{near[0]}"?)' if near else ""


def keys_of(model: type[BaseModel]) -> str:
    """The names of a block's keys."""
    return ", ".join(model.model_fields)


def explain(name: str, model: type[BaseModel], error: Any) -> str:
    """One line for one of pydantic's errors: the key, what was given and what is accepted.

    Args:
        name: what stands before the key, "coat" for this block.
        model: what was validated.
        error: one of ``ValidationError.errors()``.
    """
    location = [str(part) for part in error["loc"]]
    key = ".".join([name, *location])
    kind, given = error["type"], error.get("input")
    if kind == "value_error":  # our own validators word the whole line
        return f"{key}.{error['ctx']['error']}"
    if kind == "missing":
        return f"{key}: missing, accepted: a value (no default)"
    if kind == "extra_forbidden":
        owner = model
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation  # type: ignore[assignment]
        close = difflib.get_close_matches(location[-1], owner.model_fields, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else _elsewhere(name, model, location[-1])
        return f"{key}: unknown key{hint}, accepted: {keys_of(owner)}"
    if kind == "literal_error":
        accepted = error["ctx"]["expected"].replace("True", "true").replace("False", "false")
    elif kind == "model_type":
        accepted = f"an object with keys {keys_of(model.model_fields[location[0]].annotation)}"  # type: ignore[arg-type]
    else:
        accepted = _ACCEPTED.get(kind) or error["msg"].removeprefix("Input should be ")
    return f"{key}: got {json.dumps(given, default=str)}, accepted: {accepted}"


def _elsewhere(name: str, model: type[BaseModel], key: str) -> str:
    """What follows a key that other places in the block have."""
    parts = {part: field.annotation for part, field in model.model_fields.items()}
    found = [f"{name}.{part}.{key}" for part, block in parts.items() if key in getattr(block, "model_fields", {})]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


_ACCEPTED = {
    "bool_type": "true or false",
    "tuple_type": "a list of integers",
    "int_type": "an integer",
    "int_parsing": "an integer",
}
"""Where pydantic's own words are about Python."""
