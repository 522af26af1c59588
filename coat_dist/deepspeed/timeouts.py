"""Timeouts of collectives: every process group has that of the default one.

Groups that DeepSpeed and Megatron make have torch's default or half an hour, whatever the program gave to
``init_process_group``: a rank that does not come would keep the others that long.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["follow_default_group", "group_timeout"]


def group_timeout(group: Any = None) -> float:
    """Seconds after which collectives of a group (None: the default one) fail."""
    group = group or dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return options._timeout.total_seconds()
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def follow_default_group() -> None:
    """Give groups with a default timeout that of the default group; any other was chosen, and stays."""
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized() or not hasattr(c10d, "_set_pg_timeout"):
        return
    wanted = group_timeout()
    defaults = {c10d.default_pg_timeout.total_seconds(), 600.0, 1800.0}  # torch's, of NCCL, and Megatron's
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD and group_timeout(group) in defaults - {wanted}:
            with suppress(RuntimeError, ValueError):  # a backend without timeouts
                c10d._set_pg_timeout(timedelta(seconds=wanted), group)
