"""config.json's keys of mixtures of experts, to ``ModelConfig`` and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from launch.hf.families import Family
from launch.model.gpt import ModelConfig

__all__ = ["expert_keys", "function_of_experts", "read_experts", "refused_experts", "with_their_names"]

_NAMES = ("num_experts", "num_local_experts")
"""The same key: transformers 4 writes the first for Qwen3-MoE, transformers 5 the second."""


def with_their_names(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """config.json with the number of experts under the name that the family's table has."""
    own = next((name for name in _NAMES if name in family.experts), None)
    other = next((name for name in _NAMES if name != own), "")
    if own is None or values.get(other) is None or values.get(own) is not None:
        return dict(values)
    return {own if key == other else key: value for key, value in values.items()}


def refused_experts(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    """A line for every key of experts that cannot be honoured."""
    if not family.experts:
        return
    given = {**family.absent, **{key: value for key, value in values.items() if value is not None}}
    for key in (*family.experts, "decoder_sparse_step"):
        value = given.get(key)
        if key != "router_aux_loss_coef" and key in given and (type(value) is not int or value < 1):
            yield f"{key}: got {json.dumps(value)}, accepted: an integer of at least 1"
    one, other = (values.get(name) for name in _NAMES)
    if one is not None and other is not None and one != other:
        accepted = f"absent, or that of num_experts ({json.dumps(one)})"
        yield f"num_local_experts: got {json.dumps(other)}, accepted: {accepted}"
    normed = given.get("norm_topk_prob", True)
    if normed not in (False, True):
        yield f"norm_topk_prob: got {json.dumps(normed)}, accepted: true or false"
    elif normed and given.get("num_experts_per_tok") == 1:
        what = "norm_topk_prob: got true" if "norm_topk_prob" in family.absent else "num_experts_per_tok: got 1"
        yield f"{what}, accepted: another with one expert a token (its probability would always be 1)"
    dense, layers = given.get("mlp_only_layers", []), given.get("num_hidden_layers")
    if type(layers) is not int:
        return
    if not (isinstance(dense, list) and all(type(i) is int and 0 <= i < layers for i in dense)):
        yield f"mlp_only_layers: got {json.dumps(dense)}, accepted: numbers of layers, from 0 to {layers - 1}"
    elif "mlp_only_layers" in given and type(given["decoder_sparse_step"]) is int and not any(_pattern(given)):
        yield "mlp_only_layers and decoder_sparse_step: leave no layer with experts, accepted: at least one"


def read_experts(given: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Keys of ``ModelConfig``; ``given`` has what the family takes for absent ones."""
    described = {ours: given[theirs] for theirs, ours in family.experts.items()}
    if described:
        described["moe_aux_loss_coeff"] = float(described["moe_aux_loss_coeff"])
        described["moe_router_pre_softmax"] = not given.get("norm_topk_prob", True)
        if "mlp_only_layers" in given and not all(pattern := _pattern(given)):
            described["moe_layer_freq"] = pattern
    return described


def _pattern(given: Mapping[str, Any]) -> list[int]:
    step, dense = given["decoder_sparse_step"], given["mlp_only_layers"] or []
    return [int(step > 0 and (i + 1) % step == 0 and i not in dense) for i in range(given["num_hidden_layers"])]


def expert_keys(model: ModelConfig, family: Family) -> dict[str, Any]:
    """What a family with experts says of a model; the other way of :func:`read_experts`."""
    if not family.experts or model.num_moe_experts is None:
        return {}
    inner = model.moe_ffn_hidden_size or model.ffn_hidden_size
    values = {theirs: getattr(model, ours) for theirs, ours in family.experts.items()}
    if "moe_intermediate_size" not in family.experts:
        return {**values, "intermediate_size": inner}
    dense = [i for i in range(model.num_layers) if not model.has_experts(i)]
    return {
        **values,
        "moe_intermediate_size": inner,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def function_of_experts(model: ModelConfig) -> dict[str, Any]:
    """See ``config_out.function_of``: the part of the experts."""
    if model.num_moe_experts is None:
        return {"num_moe_experts": None, "ffn_hidden_size": model.ffn_hidden_size}
    layers = [model.has_experts(i) for i in range(model.num_layers)]
    softmax = model.moe_router_score_function == "softmax"
    return {
        "num_moe_experts": model.num_moe_experts,
        "ffn_hidden_size": None if all(layers) else model.ffn_hidden_size,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "moe_layer_freq": layers,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax if softmax else None,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
    }
