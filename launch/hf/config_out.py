"""``ModelConfig`` to config.json: the one that came with the weights where it still says what the model is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.hf.config import ACTIVATION_NAMES, model_from_config
from launch.hf.experts import expert_keys, function_of_experts
from launch.hf.families import FAMILIES, Family
from launch.model.gpt import ModelConfig

__all__ = ["config_for", "function_of"]

_ORDER = ("llama", "qwen2", "qwen3", "olmo", "olmo2", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")
"""Families are tried in this order for a model that came from none."""


def function_of(model: ModelConfig) -> dict[str, Any]:
    """What decides what a model computes, each thing said in one way, by the keys of ``ModelConfig``."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "head_size": model.head_channels,
        "vocab_size": model.vocab_size,
        "activation": model.activation,
        "linear_bias": model.linear_bias,
        "qkv_bias": model.qkv_bias or model.linear_bias,
        "attention_output_bias": model.attention_output_bias or model.linear_bias,
        "normalization": model.normalization,
        "norm_affine": model.norm_affine,
        "norm_eps": model.norm_eps,
        "norm_placement": model.norm_placement,
        "qk_norm": model.qk_norm,
        "rotary_base": model.rotary_base,
        "rope_scaling": model.rope_scaling,
        "tie_embeddings": model.tie_embeddings,
        **function_of_experts(model),
    }


def config_for(
    model: ModelConfig,
    dtype: torch.dtype,
    remembered: Mapping[str, Any] | None = None,
    family: str | None = None,
    end: int | None = None,
) -> tuple[dict[str, Any], Family]:
    """The content of config.json for a model.

    Args:
        model: what the weights are of.
        dtype: of the tensors.
        remembered: config.json that came with the initial weights: where it describes this model it stays as it is, but
            for the dtype; where it does not, keys that decide what the model computes are replaced.
        family: ``model_type`` to write; None = the remembered one's, or the first that can say what the model is.
        end: ``eos_token_id`` of a config.json that is made anew.

    Raises:
        CoatConfigError: no family, or not this one, has such a model; names the keys.
    """
    known = remembered if remembered is not None and remembered.get("model_type") in FAMILIES else None
    if known is not None and family in (None, known["model_type"]):
        if not _differing(known, model):
            return _with_dtype(known, known, dtype), FAMILIES[known["model_type"]]
        family = known["model_type"]
    tried: dict[str, list[str]] = {}
    for name in [family] if family else _ORDER:
        if name not in FAMILIES:
            continue
        kept = known if known is not None and known["model_type"] == name else None
        config = {
            **(_without_older(kept) if kept else _HABITS | {"eos_token_id": end}),
            **_described(model, FAMILIES[name]),
        }
        config = _with_dtype(config, kept or {}, dtype)
        tried[name] = _differing(config, model)
        if name == "llama" and kept is None and model.hidden_size % model.num_attention_heads:
            tried[name].append("head_size")  # transformers refuses such a config.json of this family alone
        if not tried[name]:
            return config, FAMILIES[name]
    nearest = min(tried, key=lambda name: len(tried[name]))
    values = model.model_dump()
    lines = [f"model.{key}: got {json.dumps(values.get(key))}, which {nearest} cannot say" for key in tried[nearest]]
    raise CoatConfigError("\n".join([*lines, f"accepted: what one of {', '.join(FAMILIES)} has"]))


_HABITS = {"bos_token_id": None, "pad_token_id": None, "use_cache": True}


def _differing(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Keys in which a config.json's model is another."""
    try:
        read, _ = model_from_config(dict(config), "config.json")
    except CoatConfigError as problem:
        key = str(problem).partition(":")[2].partition(":")[0].strip()
        return ["activation" if key == "hidden_act" else key]
    one, other = function_of(read), function_of(model)
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    if read.seq_length < model.seq_length:
        differing.append("seq_length")
    return differing


def _described(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Every key of config.json that decides what the model computes."""
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.seq_length,
        "hidden_act": acts.get(model.activation, model.activation),
        "initializer_range": model.init_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": None if model.rope_scaling is None else dict(model.rope_scaling),  # transformers adds to it
    }
    if "norm_eps" in family.says:
        config["rms_norm_eps"] = model.norm_eps
    if "head_dim" in family.says or model.head_size is not None:
        config["head_dim"] = model.head_channels
    if "bias" in family.says:
        config["attention_bias"] = model.qkv_bias or model.linear_bias
        config["mlp_bias"] = model.linear_bias
    if "sliding_window" in family.says:
        config["sliding_window"] = model.sliding_window
    if "use_sliding_window" in family.says:
        config["use_sliding_window"] = False
    if "qkv_bias" in family.says:
        config["qkv_bias"] = model.qkv_bias or model.linear_bias
    return config | expert_keys(model, family)


def _without_older(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that another version of transformers spells differently."""
    spelt = ("rope_parameters", "rope_theta", "rope_scaling", "num_experts", "num_local_experts")
    return {k: v for k, v in config.items() if k not in spelt}


def _with_dtype(config: Mapping[str, Any], like: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``config`` with the dtype under the name that ``like`` uses: transformers 5 calls it ``dtype``, and reads the
    older name too."""
    rest = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return {**rest, "dtype" if "dtype" in like else "torch_dtype": str(dtype).removeprefix("torch.")}
