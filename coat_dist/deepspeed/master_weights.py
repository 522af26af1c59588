"""Master weights as bfloat16 weights and remainders under ZeRO: one copy of the weights, and accessors that are exact.

With ``bf16_master_weights_and_grads`` ZeRO hands the optimizer a bfloat16 copy of its bfloat16 partition.
:func:`enable_remainders` makes the two the same memory, so that master weight and weight take 4 bytes; what DeepSpeed
then copies from one to the other is a tensor onto itself, which torch skips. As DeepSpeed takes the bfloat16 partition
for the master weight, two of its services are overridden on the instance: ``safe_get_full_fp32_param`` and
``safe_set_full_fp32_param`` (and their local forms), and loading of weights without optimizer states.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ..checkpoint.zero_partitions import base_optimizer, is_zero, members, partitions
from ..optim.master import read_master, write_master
from ..optim.state import ensure_state, has_remainder
from .coat_accessors import get_full_master, set_full_master
from .links import after_linking
from .reviewed import was_read

__all__ = ["check_master_weights", "enable_remainders"]


def check_master_weights(zero: Any) -> None:
    """Compare the options of a CoatAdamW with the weights that a ZeRO optimizer hands it.

    Raises:
        ValueError: names the parameter group, what its weights are and what its option says.
    """
    if base_optimizer(zero) is None or not is_zero(zero):
        return  # without ZeRO, it is the step that looks at the parameters' type
    for part in partitions(zero):
        if has_remainder(part.group) != (part.flat.dtype == torch.bfloat16):
            raise ValueError(
                f"CoatAdamW master_weights: got {part.group['master_weights']!r} in group "
                f"{part.group.get('name', '')!r}, and {part.flat.dtype} from {type(zero).__name__}, accepted: "
                "'bf16_remainder' with bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states true, or "
                "'parameter' without them"
            )


def enable_remainders(zero: Any) -> bool:
    """Prepare a ZeRO-1, 2 or 3 optimizer whose CoatAdamW keeps remainders, right after it was built.

    Returns:
        Whether weights and the partitions that are stepped are one copy now: not without remainders, and not with a
        DeepSpeed that was not read (``reviewed.py``). All else is the same with two copies.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    coat = base_optimizer(zero)
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3) or coat is None:
        return False
    if not all(has_remainder(part.group) for part in partitions(zero)):
        return False
    shared = was_read()
    if type(zero) is DeepSpeedZeroOptimizer:
        if shared:
            for i, flat in enumerate(zero.single_partition_of_fp32_groups):
                flat.data = zero.get_bit16_param_group(i)[0].data
        after_linking(zero, "masters", _answer)  # links anew: those there were held views of the second copy
    else:
        if shared:
            for flat, weights in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
                flat.data = weights.data
        for name in ("get_full_hp_param", "set_full_hp_param", "get_local_fp32_param", "set_local_hp_param"):
            setattr(zero, name, types.MethodType(globals()[f"_zero3_{name}"], zero))
    zero._restore_from_bit16_weights = types.MethodType(_restore_from_bit16_weights, zero)
    return shared


def _answer(zero: Any) -> None:
    """In place of the methods that ZeRO-1 and 2 give every parameter to read and write its master weights."""
    for param in (p for params in members(zero) for p in params):
        param.get_full_hp_param = types.MethodType(get_full_master, param)
        param.set_full_hp_param = types.MethodType(set_full_master, param)


# Only for the master weight: ``deepspeed_accessors.py`` answers for the moments before it asks these.


def _zero3_get_full_hp_param(zero: Any, param: Any) -> torch.Tensor | None:
    return get_full_master(param) if param.requires_grad else None


def _zero3_set_full_hp_param(zero: Any, value: torch.Tensor, param: Any) -> None:
    if param.requires_grad:
        set_full_master(param, value)


def _zero3_get_local_fp32_param(zero: Any, param: Any) -> torch.Tensor | None:
    if not param.requires_grad:
        return None
    i, start, numel = zero.grad_position[zero.get_param_id(param)]
    flat = zero.fp32_partitioned_groups_flat[i]
    return read_master(flat, zero.optimizer.state.get(flat) or {}, start, numel)


def _zero3_set_local_hp_param(zero: Any, value: torch.Tensor, param: Any) -> None:
    if not param.requires_grad or value.numel() != param.ds_tensor.numel():
        type(zero).set_local_hp_param(zero, value, param)  # nothing to do, or DeepSpeed's own error
        return
    i, start, _ = zero.grad_position[zero.get_param_id(param)]
    part = list(partitions(zero))[i]
    state = ensure_state(zero.optimizer.state, part.flat, part.group)
    write_master(part.flat, state, start, value.detach().reshape(-1))


def _restore_from_bit16_weights(zero: Any) -> None:
    """Weights were loaded without optimizer states: they are the master weights."""
    type(zero)._restore_from_bit16_weights(zero)
    for state in zero.optimizer.state.values():
        if "coat_p_low" in state:
            state["coat_p_low"].zero_()
