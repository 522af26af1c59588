"""What follows whenever ZeRO links parameters to their shards of the master weights.

ZeRO-1, 2 and BF16_Optimizer call ``_link_all_hp_params`` when they are built and after loading. Here it is replaced
once, by itself and what has to follow, in the order of the list in ``attach.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["after_linking"]


def after_linking(zero: Any, action: Callable[[Any], None]) -> None:
    """Call ``action(zero)`` now and after each time that parameters are linked, after the actions that came before.

    Args:
        zero: a ZeRO-1, 2 or BF16_Optimizer; its parameters are linked anew.
        action: may rely on the links being new.
    """
    actions: list[Callable[[Any], None]] | None = getattr(zero, "coat_after_linking", None)
    if actions is None:
        actions = zero.coat_after_linking = []
        link = zero._link_all_hp_params

        def link_all() -> None:
            link()
            for action in actions:
                action(zero)

        zero._link_all_hp_params = link_all
    actions.append(action)
    zero._link_all_hp_params()
