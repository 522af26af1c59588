"""How many steps a parameter has taken, as its state holds it: an int, or a tensor for steps
inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["as_count", "is_count"]


def as_count(
    steps: int | torch.Tensor, param: torch.Tensor, group: Mapping[str, Any]
) -> int | torch.Tensor:
    """A number of steps as the group says: an int, or with ``capturable`` an fp32 scalar on the
    parameter's device.

    Waits for the device only where a tensor becomes an int.
    """
    if not group.get("capturable"):
        return int(steps) if isinstance(steps, torch.Tensor) else steps
    if isinstance(steps, torch.Tensor):
        return steps.to(param.device, torch.float32).reshape(())
    return torch.full((), float(steps), dtype=torch.float32, device=param.device)


def is_count(steps: Any) -> bool:
    """Whether this is a number of steps, as far as can be said without reading a tensor."""
    if isinstance(steps, torch.Tensor):
        return steps.numel() == 1 and steps.dtype == torch.float32
    return type(steps) is int and steps >= 0
