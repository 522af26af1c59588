"""Keys of new parameter groups that look like options, and would be without effect."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["check_keys"]

_ONE_WAY = ("fused", "foreach")
"""Options of torch's AdamW that choose an implementation."""
_NEAR = 0.85
"""Least similarity (difflib's ratio) of a key and an option that makes the key a misspelling; their
lengths also differ by one letter at most. "wieght_decay" has 0.92. Keys that programs invent are
often longer: "no_weight_decay" has 0.89, "weight_decay_mult" 0.83.
"""


def check_keys(group: Mapping[str, Any], options: Collection[str], what: str = "CoatAdamW") -> None:
    """Raise ValueError for keys of a new group that are nearly options, and for options of torch's
    AdamW that CoatAdamW does not have.

    Keys of the program's own ("name", "lr_scale", "layer_id") stay, and so do loaded ones, whatever
    they are.

    Args:
        group: as it was given.
        options: those that a group can have.
        what: begins the message.
    """
    known = {*options, "params", "names", "param_names", "name"}
    for key in group:
        written = str(key).lower().replace("-", "_")
        as_long = [one for one in options if abs(len(one) - len(written)) <= 1]
        near = difflib.get_close_matches(written, as_long, 1, _NEAR)
        if key not in known and near:
            raise ValueError(
                f"{what} {key}: unknown key of a parameter group, accepted: {near[0]!r}, or "
                "another name"
            )
    for key in _ONE_WAY:
        if group.get(key):
            raise ValueError(
                f"{what} {key}: got {group[key]!r}, accepted: False, there is one implementation"
            )
