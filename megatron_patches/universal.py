"""How Megatron divides each parameter over tensor-parallel ranks, in the words of DeepSpeed's universal checkpoints."""

from __future__ import annotations

import re
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import nn

__all__ = ["universal_checkpoint_info"]

_VERSION = 0.4
"""Of DeepSpeed's description, as DeepSpeed 0.19 reads it."""


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """The description to set as ``model.universal_checkpoint_info`` before ``deepspeed.initialize``.

    DeepSpeed saves it with the model, and converters join tensor-parallel shards by it. Parameters that no list names
    are divided along dimension 0 (column-parallel weights and biases, the vocabulary).

    * Parameters without a true ``tensor_model_parallel`` are replicated.
    * ``partition_dim`` 1 is row parallel.
    * ``linear_fc1`` of a gated MLP holds ``[gate; up]`` of its rank: its halves are joined separately.

    * ``expert_parallel`` says what the experts of each rank are called in the whole model, where ranks divide them
      (``coat_dist/checkpoint/expert_names.py``).

    Args:
        model: Megatron-core modules, unsharded by ZeRO or ZeRO-3's.

    Returns:
        Lists of regular expressions, each of which matches one parameter's name.
    """
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "tp_replicated_parameter_patterns": [],
        "parameter_with_row_parallelism_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
    }
    modules = dict(model.named_modules())
    experts = _divided_experts(modules)
    if experts:
        info["expert_parallel"] = {
            "size": parallel_state.get_expert_model_parallel_world_size(),
            "rank": parallel_state.get_expert_model_parallel_rank(),
            "names": experts,
        }
    for name, p in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if not getattr(p, "tensor_model_parallel", False):
            kind = "tp_replicated_parameter_patterns"
        elif getattr(p, "partition_dim", 0) == 1:
            kind = "parameter_with_row_parallelism_patterns"
        elif ".linear_fc1." in name and getattr(getattr(owner, "config", None), "gated_linear_unit", False):
            kind = "parameter_with_2_sub_params_cat_dim_0"
        else:
            continue
        info[kind] += [f"^{re.escape(whole)}$" for whole in experts.get(name, [name])]
    return info


def _divided_experts(modules: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Names in the whole model of what this rank calls its experts, by expert-parallel rank; none where each rank holds
    all of them."""
    size = parallel_state.get_expert_model_parallel_world_size() if parallel_state.is_initialized() else 1
    names: dict[str, list[str]] = {}
    for path, module in modules.items() if size > 1 else ():
        if not isinstance(module, BaseMoELayer):
            continue
        for name, parameter in module.experts.named_parameters(f"{path}.experts"):
            if getattr(parameter, "allreduce", True):
                continue
            found = re.match(rf"{re.escape(path)}\.experts\.local_experts\.(\d+)\.(.*)", name)
            if found is None:
                raise ValueError(
                    f"{name}: got experts in one tensor with expert_model_parallel_size {size}, accepted: 1, or "
                    "moe_grouped_gemm false"
                )
            count, number = module.num_local_experts, int(found[1])
            names[name] = [f"{path}.experts.local_experts.{rank * count + number}.{found[2]}" for rank in range(size)]
    return names
