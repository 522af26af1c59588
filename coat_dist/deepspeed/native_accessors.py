"""DeepSpeed's own accessors of optimizer states, answered with decoded moments.

``safe_get_full_optimizer_state``, ``safe_set_full_optimizer_state`` and, at stage 3, ``safe_get_local_optimizer_state``
and ``safe_set_local_optimizer_state`` look for a tensor of the parameter's elements under the key they are given. With
FP8 moments there is none: a rank that holds part of the parameter would raise, and one that does not would wait for it
for ever. Here "exp_avg" and "exp_avg_sq" mean the moments, whatever they are stored as, and other keys raise on every
rank.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ..checkpoint.zero_partitions import Fragment, Partition, members
from ..optim.moments import read_moment, write_moment
from ..optim.state import MOMENT_OF, WhichMoment, ensure_state
from .accessors import fragment_of, safe_get_full_moment, safe_set_full_moment
from .links import after_linking

__all__ = ["answer_deepspeeds_accessors"]


def answer_deepspeeds_accessors(zero: Any) -> None:
    """Replace the methods behind DeepSpeed's accessors on one ZeRO optimizer with a CoatAdamW, or on its parameters."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        _answer_stage3(zero)
        return
    after_linking(zero, "moments", _answer)


def _answer(zero: Any) -> None:
    for param in (p for params in members(zero) for p in params):
        master = param.get_full_hp_param, param.set_full_hp_param  # DeepSpeed's, or those of master_weights.py
        param.get_full_hp_param = types.MethodType(functools.partial(_get_full, master[0]), param)
        param.set_full_hp_param = types.MethodType(functools.partial(_set_full, master[1]), param)


def _which(key: str) -> WhichMoment:
    if key not in MOMENT_OF:
        raise ValueError(f"optim_state_key: got {key!r}, accepted with CoatAdamW: {', '.join(MOMENT_OF)}")
    return MOMENT_OF[key]


def _get_full(master: Callable[[], torch.Tensor], param: Any, optim_state_key: str | None = None) -> torch.Tensor:
    if optim_state_key is None:
        return master()
    return safe_get_full_moment(param, _which(optim_state_key))


def _set_full(
    master: Callable[[torch.Tensor], None], param: Any, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    if optim_state_key is None:
        master(value)
    else:
        safe_set_full_moment(param, value, _which(optim_state_key))


def _local(zero: Any, param: Any) -> tuple[Partition, Fragment]:
    found = fragment_of(zero, param)
    assert found is not None, "at stage 3 every rank has a part of every parameter"
    return found


def _answer_stage3(zero: Any) -> None:
    get_full, set_full = zero.get_full_hp_param, zero.set_full_hp_param
    get_local, set_local = zero.get_local_fp32_param, zero.set_local_hp_param

    def get_full_hp_param(param: Any, optim_state_key: str | None = None) -> torch.Tensor:
        if optim_state_key is None:
            return get_full(param)
        return safe_get_full_moment(param, _which(optim_state_key))

    def set_full_hp_param(value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            set_full(value, param)
        else:
            safe_set_full_moment(param, value, _which(optim_state_key))

    def get_local_fp32_param(param: Any, optim_state_key: str | None = None) -> torch.Tensor:
        if optim_state_key is None:
            return get_local(param)
        which = _which(optim_state_key)
        part, f = _local(zero, param)
        state = zero.optimizer.state.get(part.flat) or {}
        local = torch.zeros(param.ds_tensor.ds_numel, device=part.flat.device)  # padded, as DeepSpeed gives it
        if "step" in state and f.numel:
            local[: f.numel] = read_moment(state, part.group, which, f.start, f.numel)
        return local

    def set_local_hp_param(value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            set_local(value, param)
            return
        which = _which(optim_state_key)
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

    zero.get_full_hp_param, zero.set_full_hp_param = get_full_hp_param, set_full_hp_param
    zero.get_local_fp32_param, zero.set_local_hp_param = get_local_fp32_param, set_local_hp_param
