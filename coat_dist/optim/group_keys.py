"""Keys of new parameter groups that look like options, and would be without effect."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_NEAR = 0.85
"""Least similarity (difflib's ratio) of a key and an option that makes the key a misspelling; their
lengths also differ by one letter at most. "wieght_decay" has 0.92. Keys that programs invent are
often longer: "no_weight_decay" has 0.89, "weight_decay_mult" 0.83.
"""


def check_keys(group: Mapping[str, Any], options: Collection[str]) -> None:
    """Raise ValueError for keys of a new group that are nearly options.

    Keys of the program's own ("name", "lr_scale", "layer_id") stay, and so do loaded ones, whatever
    they are.

    Args:
        group: as it was given.
        options: those that a group can have.
    """
    known = {*options, "params", "names", "param_names", "name"}
    for key in group:
        written = str(key).lower().replace("-", "_")
        as_long = [one for one in options if abs(len(one) - len(written)) <= 1]
        near = difflib.get_close_matches(written, as_long, 1, _NEAR)
        if key not in known and near:
            raise ValueError(
                f"CoatAdamW {key}: unknown key of a parameter group, accepted: {near[0]!r}, or "
                "another name"
            )
