"""``offload_states`` and ``reload_states`` of ZeRO-1, 2 and 3 with a CoatAdamW, as programs call
them that also infer.

DeepSpeed moves weights and gradients. Its own way with states would bring those that live in host
memory to the GPU, knows torch's moments only at stage 3, and gives weights and masters that share
memory (``master_weights.py``) a copy each. Of these, "hp_params" are the weights and move with
"lp_params"; remainders are states.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch

from ...checkpoint.zero_partitions import members, partitions
from ...optim import host
from .master_weights import keeps_remainders, share_memory
from .step import is_verified_build


def _shared(zero: Any) -> bool:
    return keeps_remainders(zero) and is_verified_build()


def _masters(zero: Any) -> list[torch.Tensor]:
    """fp32 master weights that DeepSpeed refuses to move: those of stage 3."""
    return [] if _shared(zero) else getattr(zero, "fp32_partitioned_groups_flat", [])


def _ours(zero: Any) -> set[str]:
    """Kinds of states that are moved here, and not by DeepSpeed."""
    return {"optim_states", *(["hp_params"] if _shared(zero) or _masters(zero) else [])}


def offload_states(
    zero: Any, include: Any = None, device: Any = None, pin_memory: bool = True, **more: Any
) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    kinds = {
        x for x in OffloadStateTypeEnum if include is None or x in include
    } - zero.offloaded_states
    ours = kinds & _ours(zero)
    if "optim_states" in ours:
        for state in zero.optimizer.state.values():
            tensors = {
                k: t
                for k, t in state.items()
                if isinstance(t, torch.Tensor) and t.device.type != "cpu"
            }
            state.update(host.to_host(tensors, pin_memory) if tensors else {})
        host.release()
    for flat in _masters(zero) if "hp_params" in ours else ():
        flat.data = host.to_host({"": flat.data}, pin_memory and flat.is_cuda)[""]
    if "lp_params" in kinds and _shared(zero) and hasattr(zero, "_clear_hp_buffer_references"):
        zero._clear_hp_buffer_references()
    for name in (
        ()
        if pin_memory
        else ("lp_param_contiguous_pin_buffer", "lp_grad_partitions_flat_pin_buffers")
    ):
        vars(zero).pop(name, None)  # of an earlier call: ZeRO-3 would reload from it
    # ZeRO-3 takes trained weights, whose buffer has the order of groups, for all of the model's, in
    # the model's order.
    if (module := vars(zero).get("module")) is not None:
        zero.module = types.SimpleNamespace(parameters=lambda: itertools.chain(*members(zero)))
    try:
        type(zero).offload_states(
            zero, [*(kinds - ours)], device or OffloadDeviceEnum.cpu, pin_memory, **more
        )
    finally:
        if module is not None:
            zero.module = module
    if "lp_params" in kinds and _shared(zero):
        _follow(zero)
        torch.cuda.empty_cache()
    # Accessors read zeros and write nothing where parameters have no links.
    if hasattr(zero, "_link_all_hp_params"):
        zero._link_all_hp_params()
    zero.offloaded_states |= ours


def _follow(zero: Any) -> None:
    """Let masters be the weights again, where these have been moved."""
    if hasattr(zero, "lp_param_buffer"):
        flats, start = zero.fp32_partitioned_groups_flat, 0
        for flat in flats:
            numel = flat.numel()
            flat.data = zero.lp_param_buffer.narrow(0, start, numel)
            start += numel
        return
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(zero.real_dp_process_group[i])
        flat.data = zero.get_data_parallel_partitions(zero.bit16_groups_flat[i], i)[rank]


def reload_states(zero: Any, non_blocking: bool = False) -> None:
    ours = zero.offloaded_states & _ours(zero)
    zero.offloaded_states -= ours
    follow = _shared(zero) and "lp_params" in zero.offloaded_states
    type(zero).reload_states(zero, non_blocking)
    if follow:
        share_memory(zero)
        if hasattr(zero, "_link_all_hp_params"):
            zero._link_all_hp_params()
    for flat in _masters(zero) if "hp_params" in ours else ():
        flat.data = flat.data.to(zero.device)
    for part in partitions(zero) if "optim_states" in ours else ():
        host.to_home(zero.optimizer.state.get(part.flat) or {}, part.flat, part.group)
