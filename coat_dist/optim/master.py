"""fp32 master weights, whether a parameter is one or only the upper half of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ops import join, split
from .sharded import like, local
from .state import ensure_state, has_remainder, remainder


def export_master(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """The master weight of one parameter: a new fp32 tensor of its shape; of a DTensor, one
    distributed as it is.

    Args:
        param: the parameter.
        state: its state, ``optimizer.state[param]``; may be empty before the first step.
    """
    mine = local(param.detach())
    return like(param, read_master(mine.reshape(-1), state, 0, mine.numel()).view(mine.shape))


@torch.no_grad()
def set_master(optimizer: Any, param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace a parameter and, with ``master_weights="bf16_remainder"``, what it lacks to be
    ``value`` exactly.

    Args:
        optimizer: a :class:`CoatAdamW`.
        param: one of its parameters; under ZeRO use DeepSpeed's ``safe_set_full_fp32_param``.
        value: floating point, of the parameter's number of elements; of a DTensor, a DTensor
            distributed as it is.

    Raises:
        ValueError: the parameter is not the optimizer's, or the sizes differ. Nothing has been
            changed then.
    """
    group = next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), None)
    if group is None:
        raise ValueError(
            f"param: got a tensor of shape {list(param.shape)}, accepted: a parameter of the "
            "optimizer"
        )
    mine, new = local(param), local(value).detach()
    if mine.numel() != new.numel() or not new.is_floating_point():
        raise ValueError(
            f"value: got {new.dtype} of {new.numel()} elements, accepted: floating point, "
            f"{mine.numel()} elements"
        )
    states = optimizer.coded_state
    state = ensure_state(states, param, group) if has_remainder(group) else states[param]
    flat = mine.reshape(-1)
    write_master(flat, state, 0, new.reshape(-1))
    if flat.data_ptr() != mine.data_ptr():  # not contiguous: a copy
        mine.copy_(flat.view(mine.shape))


def read_master(
    flat: torch.Tensor, state: Mapping[str, Any], start: int, numel: int
) -> torch.Tensor:
    """Master weights ``start`` to ``start + numel`` of a flat parameter: a new fp32 tensor."""
    part = flat.detach()[start : start + numel]
    low = remainder(state, start + numel)
    if low is None:
        return part.to(torch.float32, copy=True)
    return join(part, low[start:].to(part.device))


def write_master(
    flat: torch.Tensor, state: Mapping[str, Any], start: int, values: torch.Tensor
) -> None:
    """Replace the master weights of a flat parameter from ``start`` on by ``values``, flat, on
    any device.
    """
    end = start + values.numel()
    part, low = flat.detach()[start:end], remainder(state, end)
    if low is None:
        part.copy_(values)
        return
    upper, rest = split(values.to(part.device, torch.float32))
    part.copy_(upper)
    low[start:].copy_(rest)
