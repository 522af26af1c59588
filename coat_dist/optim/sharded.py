"""Parameters that are DTensors: FSDP2 shards, tensor parallelism, and both together.

A step works on the local tensor, and FP8 state is a plain tensor of the local shard: groups of 128
never cross ranks, so no step communicates. Only a state dict is global, because
``torch.distributed.checkpoint`` takes a plain tensor that several ranks hold under one name for
copies of each other and writes one of them.

The shapes of the global tensors depend on the parameter alone, and they are sharded as the
parameter, so a checkpoint loads on any number of ranks and on any mesh:

* Where the last dimensions hold whole groups and no shard cuts one, as of most weights, a tensor
  ``[groups, ...]`` becomes ``[rows, groups of a row, ...]``, which shares the state's memory. It
  loads to the byte.
* Elsewhere each element has its own code, amax and spacing: ``[*shape, 1]`` and ``[*shape]``, 8
  bytes instead of 2. On the same shards it loads to the byte. Other shards have other groups, whose
  moments are encoded anew (``moments.regroup``).
* Remainders belong to no group: ``coat_p_low`` becomes two bytes an element, ``[*shape, 2]``.

Only where shards of another mesh cut whole groups, as of a row of 256 in four columns, the shapes
differ, and loading is refused; :func:`coat_dist.optim.fp32_state_dict` reshards these, too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

LOW = "coat_p_low"
"""The key of remainders."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is distributed over ranks by torch."""
    # Importing it takes 0.8 s; who has a DTensor has done so.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing memory; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of ``local(param)``. Communicates only where autograd left another placement
    (partial sums).
    """
    if is_dtensor(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local(grad)


def like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, of the shape of ``local(param)``, distributed as the parameter is."""
    return _distribute(value, param, param.shape, param.stride()) if is_dtensor(param) else value


def _distribute(
    value: torch.Tensor, param: torch.Tensor, shape: Any, stride: tuple[int, ...]
) -> torch.Tensor:
    """A DTensor of these parts, sharded as a parameter, in the order of its shards.

    ``DTensor.from_local`` would copy states in host memory to the GPU, and know the default order
    of shards only.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    meta = TensorMeta(torch.Size(shape), stride, value.dtype)
    spec = dataclasses.replace(param._spec, tensor_meta=meta)  # type: ignore[attr-defined]
    return DTensor(value, spec, requires_grad=False)  # type: ignore[abstract]


def refusal(param: torch.Tensor) -> str | None:
    """What a parameter is that is distributed in a way not supported, and what is accepted; else
    None.
    """
    if is_dtensor(param) and any(p.is_partial() for p in param.placements):  # type: ignore[attr-defined]
        return f"a DTensor with placements {tuple(param.placements)}, accepted: shards and replicas"  # type: ignore[attr-defined]
    if getattr(param, "_fsdp_flattened", False):  # also where it is one of use_orig_params
        return (
            "a parameter of FullyShardedDataParallel (FSDP1), whose optim_state_dict knows tensors "
            "of the parameter's "
            "shape only, accepted: FSDP2 (torch.distributed.fsdp.fully_shard) or "
            "DistributedDataParallel"
        )
    return None


def _rows(param: torch.Tensor, size: int) -> int | None:
    """How many leading dimensions make the rows that consist of whole groups; None where shards
    cut groups.
    """
    shape, cuts = param.shape, [1] * param.dim()
    if is_dtensor(param):
        for ranks, placement in zip(param.device_mesh.shape, param.placements, strict=True):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                cuts[placement.dim] *= ranks
    for dim in range(param.dim() - 1, 0, -1):
        row = shape[dim:].numel()
        if row and row % size == 0:
            even = shape[dim] % cuts[dim] == 0 and row // size % cuts[dim] == 0
            return dim if even and all(cut == 1 for cut in cuts[dim + 1 :]) else None
    return None


def _shape(key: str, shape: torch.Size, rows: int | None, size: int) -> list[int]:
    """The shape that a ``coat_`` tensor has in a state dict, of a whole parameter or of a shard
    of this shape.
    """
    if key == LOW:
        return [*shape, 2]
    if rows is None:
        return [*shape, 1] if key.endswith("_q") else [*shape]
    return [*shape[:rows], shape[rows:].numel() // size, *([size] if key.endswith("_q") else [])]


def to_global(
    state: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a DTensor parameter as a checkpoint holds it."""
    mine, size = local(param), group["group_size"]
    rows = _rows(param, size)
    result = dict(state)
    for key, value in state.items():
        if not (isinstance(value, torch.Tensor) and key.startswith("coat_")):
            continue
        if key == LOW:
            value = value.reshape(-1)[: 2 * mine.numel()]
        # Copies: a load that is refused must not leave new codes beside old amaxes.
        elif rows is None:
            each = (
                value.clone().reshape(-1) if key.endswith("_q") else value.repeat_interleave(size)
            )
            value = each[: mine.numel()]
        shape = _shape(key, param.shape, rows, size)
        part = value.view(_shape(key, mine.shape, rows, size))
        result[key] = _distribute(part, param, shape, torch.empty(shape, device="meta").stride())
    return result


def from_global(
    saved: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any], what: str
) -> tuple[dict[str, Any], bool]:
    """The inverse of :func:`to_global`, and whether the state has an amax and a spacing for each
    element.

    A parameter that is no DTensor takes its own state, and that of a DTensor from a full state
    dict.

    Raises:
        ValueError: names ``what``, the key, and how the state and the parameter are sharded.
    """
    mine, size, distributed = local(param), group["group_size"], _sharding(param)
    groups, rows, each = -(-mine.numel() // size), _rows(param, size), False
    result = dict(saved)
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor) or key == "step":
            continue
        coded = key.startswith("coat_")
        shape = _shape(key, param.shape, rows, size) if coded else list(param.shape)
        held = _shape(key, mine.shape, rows, size) if coded else list(mine.shape)
        if (
            distributed is None
            and not is_dtensor(value)
            and (list(value.shape) != shape or not coded)
        ):
            continue  # a state of its own
        part = local(value)
        if (
            _sharding(value) != distributed
            or list(value.shape) != shape
            or list(part.shape) != held
        ):
            raise ValueError(
                f"{what}, {key}: got {list(value.shape)}, placements {_sharding(value)}, accepted: "
                f"{shape}, placements {distributed}, as the parameter is sharded now; save and "
                "load under coat_dist.optim.fp32_state_dict(optimizer) to change the sharding"
            )
        if key == LOW:
            filled = part.new_zeros(groups * 2 * size)
            filled[: part.numel()] = part.reshape(-1)
            result[key] = filled.view(groups, 2 * size)
        elif coded and rows is None:
            # Of one element, amax and spacing have the same shape in either form.
            each |= key.endswith("_q")
            result[key] = part
        elif coded:
            result[key] = part.reshape(groups, *([size] if key.endswith("_q") else []))
    return result, each


def _sharding(tensor: torch.Tensor) -> Any:
    """Placements of a DTensor and the order of its shards."""
    if not is_dtensor(tensor):
        return None
    return tuple(tensor.placements), getattr(tensor._spec, "shard_order", None)  # type: ignore[attr-defined]
