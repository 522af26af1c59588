"""DeepSpeed's own accessors, with which a program reads and writes optimizer states and master weights by parameter.

These are ``safe_get_full_optimizer_state``, ``safe_set_full_optimizer_state``, ``safe_get_full_fp32_param``,
``safe_set_full_fp32_param`` and, at stage 3, their forms with ``local``. For a state they look for a tensor of the
parameter's elements under the key they are given. With FP8 moments there is none: a rank that holds part of the
parameter would raise, and one that does not would wait for it for ever. Here "exp_avg" and "exp_avg_sq" mean the
moments, whatever they are stored as, and other keys raise on every rank. With remainders, the master weight is read and
written with its lower half, which DeepSpeed does not know of.

The accessors that this package offers itself are in ``coat_accessors.py``; most answers come from there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ...checkpoint.zero_partitions import Fragment, Partition, members, partitions
from ...optim.master import read_master, write_master
from ...optim.moments import read_moment, write_moment
from ...optim.state import MOMENT_OF, WhichMoment, ensure_state
from .coat_accessors import (
    find_trained,
    fragment_of,
    get_full_master,
    safe_get_full_moment,
    safe_set_full_moment,
    set_full_master,
)
from .links import after_linking
from .master_weights import keeps_remainders

__all__ = ["answer_on_optimizer", "answer_on_parameters"]


def _moment(key: str) -> WhichMoment:
    """Which moment one of DeepSpeed's keys means."""
    if key not in MOMENT_OF:
        raise ValueError(f"optim_state_key: got {key!r}, accepted with CoatAdamW: {', '.join(MOMENT_OF)}")
    return MOMENT_OF[key]


# Stages 1 and 2, and BF16_Optimizer: methods of every parameter, which DeepSpeed puts there whenever it links them.


def answer_on_parameters(zero: Any) -> None:
    """Answer for the parameters of a ZeRO-1, 2 or BF16_Optimizer with a CoatAdamW."""
    after_linking(zero, functools.partial(_answer, keeps_remainders(zero)))


def _answer(remainders: bool, zero: Any) -> None:
    for param in (p for params in members(zero) for p in params):
        get_master, set_master = param.get_full_hp_param, param.set_full_hp_param
        if remainders:
            get_master = functools.partial(get_full_master, param)
            set_master = functools.partial(set_full_master, param)
        param.get_full_hp_param = types.MethodType(functools.partial(_get_full, get_master), param)
        param.set_full_hp_param = types.MethodType(functools.partial(_set_full, set_master), param)


def _get_full(master: Callable[[], torch.Tensor], param: Any, optim_state_key: str | None = None) -> torch.Tensor:
    if optim_state_key is None:
        return master()
    return safe_get_full_moment(param, _moment(optim_state_key))


def _set_full(
    master: Callable[[torch.Tensor], None], param: Any, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    if optim_state_key is None:
        master(value)
    else:
        safe_set_full_moment(param, value, _moment(optim_state_key))


# Stage 3: methods of the optimizer.


def answer_on_optimizer(zero: Any) -> None:
    """Answer for a ZeRO-3 optimizer with a CoatAdamW."""
    get_full, set_full = zero.get_full_hp_param, zero.set_full_hp_param
    get_local, set_local = zero.get_local_fp32_param, zero.set_local_hp_param
    if keeps_remainders(zero):
        get_full, set_full = _get_full_master, _set_full_master
        get_local, set_local = functools.partial(_get_local_master, zero), functools.partial(_set_local_master, zero)

    # Of frozen parameters DeepSpeed's methods return None, and set nothing.

    def get_full_hp_param(param: Any, optim_state_key: str | None = None) -> torch.Tensor | None:
        if optim_state_key is None:
            return get_full(param)
        which = _moment(optim_state_key)
        return safe_get_full_moment(param, which) if param.requires_grad else None

    def set_full_hp_param(value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            set_full(value, param)
            return
        which = _moment(optim_state_key)
        if param.requires_grad:
            safe_set_full_moment(param, value, which)

    def get_local_fp32_param(param: Any, optim_state_key: str | None = None) -> torch.Tensor | None:
        if optim_state_key is None:
            return get_local(param)
        which = _moment(optim_state_key)
        return _get_local_moment(zero, param, which) if param.requires_grad else None

    def set_local_hp_param(value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            set_local(value, param)
            return
        which = _moment(optim_state_key)
        if param.requires_grad:
            _set_local_moment(zero, value, param, which)

    zero.get_full_hp_param, zero.set_full_hp_param = get_full_hp_param, set_full_hp_param
    zero.get_local_fp32_param, zero.set_local_hp_param = get_local_fp32_param, set_local_hp_param


def _get_local_moment(zero: Any, param: Any, which: WhichMoment) -> torch.Tensor:
    """This rank's part, fp32, padded as DeepSpeed gives it."""
    part, f = _local(zero, param)
    state = zero.optimizer.state.get(part.flat) or {}
    local = torch.zeros(param.ds_tensor.ds_numel, device=part.flat.device)
    if "step" in state and f.numel:
        local[: f.numel] = read_moment(state, part.group, which, f.start, f.numel)
    return local


def _set_local_moment(zero: Any, value: torch.Tensor, param: Any, which: WhichMoment) -> None:
    part, f = _local(zero, param)
    if value.numel() != param.ds_tensor.ds_numel or not value.is_floating_point():
        raise ValueError(
            f"value: got {value.dtype} {list(value.shape)}, accepted: floating point, {param.ds_tensor.ds_numel} "
            "elements, this rank's part of the parameter"
        )
    state = ensure_state(zero.optimizer.state, part.flat, part.group)
    if f.numel:
        mine = value.detach().reshape(-1)[: f.numel].to(part.flat.device, torch.float32)
        write_moment(state, part.group, which, f.start, mine)


def _local(zero: Any, param: Any) -> tuple[Partition, Fragment]:
    find_trained(param)  # an error for one that was frozen when the engine was made
    found = fragment_of(zero, param)
    assert found is not None, "at stage 3 every rank has a part of every parameter that is trained"
    return found


def _get_full_master(param: Any) -> torch.Tensor | None:
    return get_full_master(param) if param.requires_grad else None


def _set_full_master(value: torch.Tensor, param: Any) -> None:
    if param.requires_grad:
        set_full_master(param, value)


def _get_local_master(zero: Any, param: Any) -> torch.Tensor | None:
    if not param.requires_grad:
        return None
    find_trained(param)
    i, start, numel = zero.grad_position[zero.get_param_id(param)]
    flat = zero.fp32_partitioned_groups_flat[i]
    return read_master(flat, zero.optimizer.state.get(flat) or {}, start, numel)


def _set_local_master(zero: Any, value: torch.Tensor, param: Any) -> None:
    if not param.requires_grad or value.numel() != param.ds_tensor.numel():
        type(zero).set_local_hp_param(zero, value, param)  # nothing to do, or DeepSpeed's own error
        return
    find_trained(param)
    i, start, _ = zero.grad_position[zero.get_param_id(param)]
    part = list(partitions(zero))[i]
    state = ensure_state(zero.optimizer.state, part.flat, part.group)
    write_master(part.flat, state, start, value.detach().reshape(-1))
