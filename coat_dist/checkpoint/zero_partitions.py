"""What ZeRO hands an optimizer, seen from the model's side: which part of which parameter lies
where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..optim.adamw import CoatAdamW

_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""What ZeRO-1 and 2, BF16_Optimizer, and ZeRO-3 call the model's parameters by group."""


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one parameter."""

    param: Any  # torch.nn.Parameter with DeepSpeed's attributes
    shape: torch.Size  # of the whole parameter (of this tensor-parallel rank)
    first: int  # first element, in the flattened parameter
    start: int  # first element, in the partition
    numel: int


@dataclass(frozen=True)
class Partition:
    """One flat fp32 tensor that the optimizer steps, the group whose options apply, and what
    lies in it.
    """

    flat: torch.Tensor
    group: dict[str, Any]
    fragments: list[Fragment]


def base_optimizer(zero: Any) -> CoatAdamW | None:
    """The CoatAdamW inside a ZeRO optimizer; None where there is another one."""
    inner = getattr(zero, "optimizer", None)
    return inner if isinstance(inner, CoatAdamW) else None


def members(zero: Any) -> list[list[Any]]:
    """The model's parameters by parameter group (ZeRO-3: by sub-group)."""
    return next(getattr(zero, name) for name in _GROUPS if hasattr(zero, name))


def partitions(zero: Any) -> Iterator[Partition]:
    """Partitions of one of DeepSpeed's ZeRO-1, 2 or 3 optimizers or its BF16_Optimizer, in a
    fixed order.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            fragments, start = [], 0
            for param in members(zero)[i]:
                part = param.ds_tensor.ds_numel  # padded at the end of the parameter
                first = part * torch.distributed.get_rank(param.ds_process_group)
                numel = max(0, min(part, param.ds_numel - first))
                fragments.append(Fragment(param, torch.Size(param.ds_shape), first, start, numel))
                start += part
            yield Partition(
                flat, zero.optimizer.param_groups[zero.sub_group_to_group_id[i]], fragments
            )
        return
    for group, params in zip(zero.optimizer.param_groups, members(zero), strict=True):
        fragments = []
        for p in params:
            if (mapping := p._hp_mapping) is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                fragments.append(Fragment(p, p.shape, low.start, high.start, low.numel))
        yield Partition(group["params"][0], group, fragments)


@torch.no_grad()
def copy_into(parameter: Any, whole: torch.Tensor) -> None:
    """Copy a tensor of the whole shape into a parameter that nothing has gathered; at ZeRO-3 this
    rank's part.

    Not collective, but to be called on every rank, before ``initialize`` or while a checkpoint is
    loaded.
    """
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(whole)
        return
    part = parameter.ds_tensor.ds_numel  # padded at the parameter's end
    mine = whole.reshape(-1)[part * torch.distributed.get_rank(parameter.ds_process_group) :][:part]
    parameter.ds_tensor.data.view(-1)[: mine.numel()].copy_(mine)
    forget_second_shard(parameter)


def forget_second_shard(parameter: Any) -> None:
    """Let the next fetch begin from the shards, whose values have changed, and not from hpZ's copy
    of the old ones.

    DeepSpeed itself drops second shards after a step and a load, but only those of trained weights.
    """
    if getattr(parameter, "ds_secondary_tensor", None) is not None:
        parameter.ds_secondary_tensor = None
