"""Moments in fp32, as other optimizers and checkpoint formats understand them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ops import Moment, decode, encode, split
from .sharded import like, local
from .state import (
    FP32_KEYS,
    MOMENTS,
    WhichMoment,
    check_state,
    codecs,
    has_remainder,
    moment,
    new_remainder,
    pack,
    remainder,
)

__all__ = ["export_moments", "import_moments", "read_moment", "write_moment"]


def export_moments(
    param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of one parameter as new fp32 tensors of its shape.

    Args:
        param: the parameter, or any tensor of its shape.
        state: its state, ``optimizer.state[param]``.
        group: its group, or any mapping with the group's storage options.

    Returns:
        ``exp_avg`` and ``exp_avg_sq``, on the state's device; of a DTensor, DTensors distributed as it is.

    Raises:
        ValueError: the state does not fit the parameter or the group.
    """
    check_state(state, param, group, "export_moments: state")
    if group["moments"] == "fp32":
        return state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    first, second = (
        like(param, decode(moment(state, which), codec, local(param).numel()).view(local(param).shape))
        for which, codec in zip(MOMENTS, codecs(group), strict=True)
    )
    return first, second


def import_moments(
    param: torch.Tensor,
    group: Mapping[str, Any],
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    master: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The state that stores the given moments as ``group`` says, rounded to nearest, on the parameter's device.

    To be assigned to ``optimizer.state[param]`` before the next step.

    Args:
        param, group: the parameter and its group.
        exp_avg, exp_avg_sq: moments, of the parameter's number of elements; floating point. Of a DTensor, DTensors
            distributed as it is.
        step: steps taken so far.
        master: with ``master_weights="bf16_remainder"``, the fp32 master weight, whose lower half goes into the state;
            the upper half is the parameter, which is not changed. None: the parameter itself.

    Raises:
        ValueError: the sizes differ, ``exp_avg_sq`` has negative elements, or ``master`` is given without a place for
            it.
    """
    if master is not None and not has_remainder(group):
        raise ValueError("import_moments master: got a tensor, accepted: None, or master_weights='bf16_remainder'")
    for name, value in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("master", master)):
        if value is None:
            continue
        if value.numel() != param.numel() or not value.is_floating_point():
            raise ValueError(
                f"import_moments {name}: got {value.dtype} {list(value.shape)}, accepted: floating point, "
                f"{param.numel()} elements"
            )
    if local(exp_avg_sq).numel() and local(exp_avg_sq).min() < 0:
        raise ValueError("import_moments exp_avg_sq: got negative elements, accepted: squares")
    step, low = int(step), new_remainder(param, group)
    if master is not None:
        _, lower = split(local(master.detach()).reshape(-1).to(param.device, torch.float32))
        remainder(low, lower.numel()).copy_(lower)  # type: ignore[union-attr]
    if group["moments"] == "fp32":
        first, second = (
            x.detach().to(param.device, torch.float32, copy=True).reshape(param.shape) for x in (exp_avg, exp_avg_sq)
        )
        return {"step": step, "exp_avg": first, "exp_avg_sq": second, **low}
    encoded = [
        encode(local(x.detach()).to(param.device), codec)
        for x, codec in zip((exp_avg, exp_avg_sq), codecs(group), strict=True)
    ]
    return {**pack(encoded[0], encoded[1], step), **low}


def read_moment(
    state: Mapping[str, Any], group: Mapping[str, Any], which: WhichMoment, start: int, numel: int
) -> torch.Tensor:
    """Elements ``start`` to ``start + numel`` of a moment: a new flat fp32 tensor.

    Decodes no more than the groups that hold them.
    """
    if group["moments"] == "fp32":
        return state[FP32_KEYS[which]].reshape(-1)[start : start + numel].clone()
    codec = getattr(codecs(group), which)
    rows, first = _rows(state, group, which, start, numel)
    return decode(rows, codec).narrow(0, start - first, numel)


def write_moment(
    state: Mapping[str, Any], group: Mapping[str, Any], which: WhichMoment, start: int, values: torch.Tensor
) -> None:
    """Replace elements from ``start`` on by ``values``, flat, rounded to nearest.

    Elements that share a group with them are decoded and encoded again; no others change.
    """
    if group["moments"] == "fp32":
        state[FP32_KEYS[which]].view(-1)[start : start + values.numel()].copy_(values)
        return
    codec = getattr(codecs(group), which)
    rows, first = _rows(state, group, which, start, values.numel())
    decoded = decode(rows, codec)
    decoded[start - first : start - first + values.numel()] = values
    rows.copy_(encode(decoded, codec))


def _rows(
    state: Mapping[str, Any], group: Mapping[str, Any], which: WhichMoment, start: int, numel: int
) -> tuple[Moment, int]:
    """Views of the groups that hold these elements, and the index of their first element."""
    size = group["group_size"]
    first, last = start // size, -(-(start + numel) // size)
    return Moment(*(tensor[first:last] for tensor in moment(state, which))), first * size
