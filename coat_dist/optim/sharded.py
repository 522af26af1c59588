"""Parameters that are DTensors: FSDP2 shards, tensor parallelism, and both together.

A step works on the local tensor, and FP8 state is a plain tensor of the local shard: groups of 128 never cross ranks,
so no step communicates. Only a state dict is global, because ``torch.distributed.checkpoint`` takes a plain tensor that
several ranks hold under one name for copies of each other and writes one of them.

Where every row of every shard is made of whole groups, as of most weights, a state tensor ``[groups, ...]`` becomes a
DTensor ``[rows, groups of a row, ...]`` that is sharded as the parameter. It loads on any number of ranks, to the byte.
Elsewhere it becomes ``[shards, G, ...]``, sharded over dimension 0, where G is the number of groups of the largest
shard and smaller shards are filled up with zeros; a mesh that shards in several dimensions has one leading dimension
for each. That loads on the same number of shards, on others through :func:`coat_dist.optim.fp32_state_dict`.
Remainders belong to no group: ``coat_p_low`` becomes two bytes an element, of the parameter's shape.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["from_global", "is_dtensor", "like", "local", "local_grad", "refusal", "to_global"]

LOW = "coat_p_low"
"""The key of remainders."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over ranks by torch."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes 0.8 s; who has a DTensor has done so
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


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
    from torch.distributed.tensor import DTensor

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


class _Layout(NamedTuple):
    """How a state dict holds the ``coat_`` tensors of a DTensor parameter."""

    leading: list[int]
    """Global shape, without what a group holds."""
    placements: list[Any]
    held: list[int]
    """The leading shape of this rank's part."""
    marker: str | None
    """A key of states that depend on the number of shards. ``torch.distributed.checkpoint`` names it where the
    checkpoint was saved by another number, before it says that sizes differ."""


def _layout(param: torch.Tensor, group_size: int) -> _Layout:
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = list(param.device_mesh.shape), list(param.placements)  # type: ignore[attr-defined]
    shape, mine = list(param.shape), local(param).shape
    cuts = {dim: 1 for dim in range(len(shape))}
    for size, placement in zip(mesh, placements, strict=True):
        if not placement.is_replicate():
            cuts[placement.dim] *= size
    cut = {dim for dim, count in cuts.items() if count > 1}
    row = torch.Size(shape[1:]).numel()  # of a shard: that of a matrix may be cut, too
    if shape and (cut <= {0} or len(shape) == 2) and row and row % (group_size * (cuts[1] if 1 in cut else 1)) == 0:
        width = row // group_size
        return _Layout([shape[0], width], placements, [mine[0], width // (cuts[1] if 1 in cut else 1)], None)
    shards: list[int] = []
    over: list[Any] = []
    for size, placement in zip(mesh, placements, strict=True):
        if placement.is_replicate():
            over.append(Replicate())
        else:  # torch.chunk: the first shard is the largest, and rounding up twice is rounding up once
            shape[placement.dim] = -(-shape[placement.dim] // size)
            over.append(Shard(len(shards)))
            shards.append(size)
    groups = -(-torch.Size(shape).numel() // group_size)
    number = " x ".join(map(str, shards)) or "1"
    marker = f"coat_{number}_shards (for other numbers save and load under fp32_state_dict)"
    return _Layout([*shards, groups], over, [*[1] * len(shards), groups], marker)


def to_global(state: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a DTensor parameter as a checkpoint holds it. Shares memory where a shard is of full size."""
    layout = _layout(param, group["group_size"])
    result: dict[str, Any] = {layout.marker: True} if layout.marker and "coat_m_q" in state else {}
    for key, value in state.items():
        result[key] = value
        if key == LOW:
            mine = local(param)
            low = value.reshape(-1)[: 2 * mine.numel()].view(*mine.shape, 2)
            result[key] = _global(low, param, list(param.placements), [*param.shape, 2])  # type: ignore[attr-defined]
        elif isinstance(value, torch.Tensor) and key.startswith("coat_"):
            groups, inside = torch.Size(layout.held).numel(), value.shape[1:]
            if len(value) < groups:
                value = torch.cat([value, value.new_zeros(groups - len(value), *inside)])
            part = value.view(*layout.held, *inside)
            result[key] = _global(part, param, layout.placements, [*layout.leading, *inside])
    return result


def _global(value: torch.Tensor, param: torch.Tensor, placements: list[Any], shape: list[int]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = param.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def from_global(saved: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The inverse of :func:`to_global`; states of parameters that are no DTensors pass through.

    Raises:
        ValueError: names ``what``, the key, and how the state and the parameter are sharded.
    """
    layout = _layout(param, group["group_size"]) if is_dtensor(param) else None
    result = {}
    for key, value in saved.items():
        if key.startswith("coat_") and " (for other numbers" in key:
            if layout is None or key != layout.marker:
                raise ValueError(f"{what}: got the state of {key[5:]}")
            continue
        result[key] = value
        if not isinstance(value, torch.Tensor):
            continue
        found = (list(value.shape), list(value.placements)) if is_dtensor(value) else None  # type: ignore[attr-defined]
        if layout is None:
            wanted = None
        elif not key.startswith("coat_"):
            wanted = (list(param.shape), list(param.placements))  # type: ignore[attr-defined]
        elif key == LOW:
            wanted = ([*param.shape, 2], list(param.placements))  # type: ignore[attr-defined]
        else:
            wanted = (layout.leading + [group["group_size"]] * key.endswith("_q"), layout.placements)
        if found != wanted:
            given, accepted = (
                "a tensor that is not distributed" if x is None else f"a DTensor {x[0]} {tuple(x[1])}"
                for x in (found, wanted)
            )
            raise ValueError(
                f"{what}, {key}: got {given}, accepted: {accepted}, as the parameter is sharded now; save and load "
                "under coat_dist.optim.fp32_state_dict(optimizer) to change the sharding"
            )
        if layout is not None and key.startswith("coat_"):
            tensor, size = local(value), group["group_size"]
            groups = -(-local(param).numel() // size)
            if key == LOW:
                filled = tensor.new_zeros(groups * 2 * size)
                filled[: tensor.numel()] = tensor.reshape(-1)
                result[key] = filled.view(groups, 2 * size)
            else:
                result[key] = tensor.reshape(-1, *tensor.shape[len(layout.leading) :])[:groups]
    return result
