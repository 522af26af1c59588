"""What follows whenever ZeRO links parameters to their shards of the master weights.

ZeRO-1, 2 and BF16_Optimizer call ``_link_all_hp_params`` when they are built and after loading. Several modules here
correct or extend what it leaves: in a fixed order, whatever order they come in, and each once however often it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["after_linking"]

_ORDER = ("places", "masters", "moments")
"""Where parameters lie (``round_robin.py``), then accessors of master weights (``master_weights.py``), and around those
the accessors of moments (``deepspeed_accessors.py``)."""


def after_linking(zero: Any, name: str, action: Callable[[Any], None]) -> None:
    """Call ``action(zero)`` now and after each time that parameters are linked.

    Args:
        zero: a ZeRO-1, 2 or BF16_Optimizer; links its parameters anew.
        name: one of the names in ``_ORDER``; a second action of the same name takes the place of the first.
        action: may rely on the links being new, and on actions that stand earlier in the order.
    """
    actions: dict[str, Callable[[Any], None]] | None = getattr(zero, "coat_after_linking", None)
    if actions is None:
        actions = zero.coat_after_linking = {}
        link = zero._link_all_hp_params

        def link_all() -> None:
            link()
            for name in _ORDER:
                if name in actions:
                    actions[name](zero)

        zero._link_all_hp_params = link_all
    actions[name] = action
    zero._link_all_hp_params()
