"""Parameters that are DTensors: FSDP2 shards, tensor parallelism, and both together.

A step works on the local tensor, and FP8 state is a plain tensor of the local shard: groups of 128 never cross ranks,
so no step communicates. Only a state dict is global, because ``torch.distributed.checkpoint`` takes a plain tensor that
several ranks hold under one name for copies of each other and writes one of them. There, each state tensor
``[groups, ...]`` becomes a DTensor ``[shards, G, ...]`` sharded over dimension 0, where G is the number of groups of
the largest shard and smaller shards are filled up with zeros; a mesh that shards in several dimensions has one leading
dimension for each. As the number of shards is part of the shape, a checkpoint of another world size cannot be taken
for a fitting one; it loads through :func:`coat_dist.optim.fp32_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["DTensor", "from_global", "is_dtensor", "like", "local", "local_grad", "refusal", "to_global"]

DTensor: Any = None
if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over ranks by torch."""
    return DTensor is not None and isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing memory; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of ``local(param)``. Communicates only where autograd left another placement (partial sums)."""
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local(grad)


def like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, of the shape of ``local(param)``, distributed as the parameter is."""
    if not is_dtensor(param):
        return value
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def refusal(param: torch.Tensor) -> str | None:
    """What a parameter is that is distributed in a way not supported, and what is accepted; else None."""
    if is_dtensor(param) and any(p.is_partial() for p in param.placements):  # type: ignore[attr-defined]
        return f"a DTensor with placements {tuple(param.placements)}, accepted: shards and replicas"  # type: ignore[attr-defined]
    if getattr(param, "_fsdp_flattened", False):  # also where it is one of use_orig_params
        return (
            "a parameter of FullyShardedDataParallel (FSDP1), whose optim_state_dict knows tensors of the parameter's "
            "shape only, accepted: FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel"
        )
    return None


def _layout(param: torch.Tensor, group_size: int) -> tuple[list[int], list, int]:
    """Number of shards in each sharded mesh dimension, the placements of global state, groups of the largest shard."""
    shape = list(param.shape)
    shards: list[int] = []
    placements: list[Any] = []
    for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):  # type: ignore[attr-defined]
        if placement.is_replicate():
            placements.append(Replicate())
        else:  # torch.chunk: the first shard is the largest, and rounding up twice is rounding up once
            shape[placement.dim] = -(-shape[placement.dim] // size)
            placements.append(Shard(len(shards)))
            shards.append(size)
    return shards, placements, -(-torch.Size(shape).numel() // group_size)


def to_global(state: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a DTensor parameter as a checkpoint holds it. Shares memory where a shard is of full size."""
    shards, placements, groups = _layout(param, group["group_size"])
    result = dict(state)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and key.startswith("coat_"):
            if len(value) < groups:
                filling = value.new_zeros(groups - len(value), *value.shape[1:])
                value = torch.cat([value, filling])
            value = value.view(*[1] * len(shards), *value.shape)
            mesh = param.device_mesh  # type: ignore[attr-defined]
            result[key] = DTensor.from_local(value, mesh, placements, run_check=False)
    return result


def from_global(saved: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The inverse of :func:`to_global`; states of parameters that are no DTensors pass through.

    Raises:
        ValueError: names ``what``, the key, and how the state and the parameter are sharded.
    """
    distributed, result = is_dtensor(param), dict(saved)
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor):
            continue
        found = (list(value.shape), list(value.placements)) if is_dtensor(value) else None  # type: ignore[attr-defined]
        if not distributed:
            wanted = None
        elif not key.startswith("coat_"):
            wanted = (list(param.shape), list(param.placements))  # type: ignore[attr-defined]
        else:
            shards, placements, groups = _layout(param, group["group_size"])
            row = {"q": [group["group_size"]], "low": [2 * group["group_size"]]}.get(key.split("_")[-1], [])
            wanted = (shards + [groups] + row, placements)
        if found != wanted:
            given, accepted = (
                "a tensor that is not distributed" if x is None else f"a DTensor {x[0]} {tuple(x[1])}"
                for x in (found, wanted)
            )
            raise ValueError(
                f"{what}, {key}: got {given}, accepted: {accepted}, as the parameter is sharded now; save and load "
                "under coat_dist.optim.fp32_state_dict(optimizer) to change the sharding"
            )
        if distributed and key.startswith("coat_"):
            held = -(-local(param).numel() // group["group_size"])
            tensor = local(value)
            result[key] = tensor.view(tensor.shape[len(shards) :])[:held]
    return result
