"""How Megatron divides each parameter over tensor-parallel ranks, in the words of DeepSpeed's
universal checkpoints.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import nn

from ..patch.blocks import pipelined
from .pipeline import prefixes_in_whole, whole_names

_VERSION = 0.4
"""Of DeepSpeed's description, as DeepSpeed 0.19 reads it."""


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """The description to set as ``model.universal_checkpoint_info`` before
    ``deepspeed.initialize``.

    DeepSpeed saves it with the model, and converters join tensor-parallel shards by it. Parameters
    that no list names are divided along dimension 0 (column-parallel weights and biases, the
    vocabulary).

    * Parameters without a true ``tensor_model_parallel`` are replicated.
    * ``partition_dim`` 1 is row parallel.
    * ``weight1`` and ``weight2`` of experts in grouped products are whole.
    * ``linear_fc1`` of a gated MLP holds ``[gate; up]`` of its rank: its halves are joined
      separately.
    * ``expert_parallel`` says what the experts of each rank are called in the whole model, where
      ranks divide them (``coat_dist/checkpoint/names.py``).

    Args:
        model: Megatron-core modules, unsharded by ZeRO or ZeRO-3's.

    Returns:
        Lists of regular expressions, each of which matches one parameter's name. Of a pipeline
        stage also ``pipeline``: ``stages``, ``stage`` (from 0), ``virtual_stages``, and ``names``
        and ``prefixes``, which give names in the whole model by those of this stage
        (``coat_dist/checkpoint/names.py``).

    Raises:
        ValueError: experts in grouped products that tensor-parallel ranks divide; names the
            parameter.
    """
    info: dict[str, Any] = {
        "universal_checkpoint_version": _VERSION,
        "tp_replicated_parameter_patterns": [],
        "parameter_with_row_parallelism_patterns": [],
        "parameter_with_2_sub_params_cat_dim_0": [],
    }
    modules = dict(model.named_modules())
    experts, joined = _divided_experts(modules)
    if experts or joined:
        info["expert_parallel"] = {
            "size": parallel_state.get_expert_model_parallel_world_size(),
            "rank": parallel_state.get_expert_model_parallel_rank(),
            "names": experts,
            "joined": joined,
        }
    for name, p in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        # Its weights say that they are divided, whether they are or not.
        if isinstance(owner, GroupedMLP):
            if owner.tp_group.size() > 1:
                raise ValueError(
                    f"{name}: got moe_grouped_gemm with expert_tensor_parallel_size "
                    f"{owner.tp_group.size()}, accepted: "
                    "1, or moe_grouped_gemm=False (universal checkpoints cannot join the parts of "
                    "these weights)"
                )
            kind = "tp_replicated_parameter_patterns"
        elif not getattr(p, "tensor_model_parallel", False):
            kind = "tp_replicated_parameter_patterns"
        elif getattr(p, "partition_dim", 0) == 1:
            kind = "parameter_with_row_parallelism_patterns"
        elif ".linear_fc1." in name and getattr(
            getattr(owner, "config", None), "gated_linear_unit", False
        ):
            kind = "parameter_with_2_sub_params_cat_dim_0"
        else:
            continue
        info[kind] += [f"^{re.escape(whole)}$" for whole in experts.get(name, [name])]
    if pipelined(model):
        names = whole_names(model)
        for name, p in model.named_parameters():
            if getattr(p, "shared_embedding", False):  # a whole model has it once
                names[name] = re.sub(
                    r"\boutput_layer\.weight$", "embedding.word_embeddings.weight", names[name]
                )
        info["pipeline"] = {
            "stages": parallel_state.get_pipeline_model_parallel_world_size(),
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "virtual_stages": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            "names": names,
            "prefixes": prefixes_in_whole(model),
        }
    return info


def _divided_experts(modules: dict[str, nn.Module]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """For each of this rank's names of expert parameters the names in the whole model, one an
    expert-parallel rank; and weights of grouped experts, with the dimension along which experts
    count. Both are empty where each rank holds all experts.
    """
    size = (
        parallel_state.get_expert_model_parallel_world_size()
        if parallel_state.is_initialized()
        else 1
    )
    names: dict[str, list[str]] = {}
    joined: dict[str, int] = {}
    for path, module in modules.items() if size > 1 else ():
        if not isinstance(module, BaseMoELayer):
            continue
        for name, parameter in module.experts.named_parameters(f"{path}.experts"):
            if getattr(parameter, "allreduce", True):
                continue
            found = re.match(rf"{re.escape(path)}\.experts\.local_experts\.(\d+)\.(.*)", name)
            if found is None:
                joined[name] = int(name.endswith("weight1"))
                continue
            count, number = module.num_local_experts, int(found[1])
            names[name] = [
                f"{path}.experts.local_experts.{rank * count + number}.{found[2]}"
                for rank in range(size)
            ]
    return names, joined
