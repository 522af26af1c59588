"""Problems of a configuration: the key, what was given and what is accepted."""

from __future__ import annotations

import difflib
import json
from typing import Any, NamedTuple

from pydantic import BaseModel


class Problem(NamedTuple):
    """One key that cannot be honoured."""

    key: str  # dotted, such as "zero_optimization.stage"
    got: str  # `got` of the value, "missing" or "unknown key"
    accepted: str

    def __str__(self) -> str:
        return f"{self.key}: {self.got}, accepted: {self.accepted}"


def got(value: Any) -> str:
    """A value as it stands in JSON, behind the word that messages have before it."""
    return f"got {json.dumps(value, default=str)}"


def keys_of(model: type[BaseModel]) -> str:
    """The names of a block's keys."""
    return ", ".join(model.model_fields)


def explain(name: str, model: type[BaseModel], error: Any) -> Problem | str:
    """One of pydantic's ``ValidationError.errors()``, in the words of JSON; ``name`` stands before
    the key.

    A validator of the model may raise a ValueError with the rest of the line behind ``name.``, or
    with a :class:`Problem` whose key stands behind it.
    """
    location = [str(part) for part in error["loc"]]
    key = ".".join([name, *location])
    kind = error["type"]
    if kind == "value_error":
        own = error["ctx"]["error"].args[0]
        return own._replace(key=f"{key}.{own.key}") if isinstance(own, Problem) else f"{key}.{own}"
    if kind == "missing":
        return Problem(key, "missing", "a value (no default)")
    if kind == "extra_forbidden":
        for part in location[:-1]:
            model = model.model_fields[part].annotation  # type: ignore[assignment]
        close = difflib.get_close_matches(location[-1], model.model_fields, 1)
        return Problem(
            key, "unknown key" + (f" (did you mean {close[0]!r}?)" if close else ""), keys_of(model)
        )
    if kind == "literal_error":
        accepted = error["ctx"]["expected"].replace("True", "true").replace("False", "false")
    elif kind == "model_type":
        accepted = f"an object with keys {keys_of(model.model_fields[location[0]].annotation)}"  # type: ignore[arg-type]
    else:
        accepted = _ACCEPTED.get(kind) or error["msg"].removeprefix("Input should be ")
    return Problem(key, got(error.get("input")), accepted)


_ACCEPTED = {
    "bool_type": "true or false",
    "tuple_type": "a list of integers",
    "int_type": "an integer",
}
"""Where pydantic's own words are about Python."""
