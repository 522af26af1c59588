"""``ModelConfig`` to config.json: the one that came with the weights where it still describes
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coat_dist import CoatConfigError
from launch.convert.config_json import ACTIVATION_NAMES, SIZES, model_from_config
from launch.convert.families import FAMILIES, Family
from launch.model.model_config import ModelConfig


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
        remembered: config.json that came with the initial weights: where it describes this model it
            stays as it is, but for the dtype; where it does not, keys that decide what the model
            computes are replaced.
        family: ``model_type`` to write; None = the remembered one's, or the first that can describe
            the model.
        end: ``eos_token_id`` of a new config.json.

    Raises:
        CoatConfigError: no family, or not this one, has such a model; names the keys.
    """
    kind = (remembered or {}).get("model_type")
    known = remembered if remembered and kind in FAMILIES and family in (None, kind) else None
    if known is not None:
        if not _different(known, model):
            return _with_dtype(known, known, dtype), FAMILIES[known["model_type"]]
        family = known["model_type"]
    tried: dict[str, list[str]] = {}
    for name in [family] if family else FAMILIES:
        kept = {"bos_token_id": None, "pad_token_id": None, "use_cache": True, "eos_token_id": end}
        # Without keys that another version of transformers spells differently.
        if known is not None:
            spelt = (
                "rope_parameters",
                "rope_theta",
                "rope_scaling",
                "num_experts",
                "num_local_experts",
            )
            kept = {key: value for key, value in known.items() if key not in spelt}
        config = _with_dtype(kept | _described(model, FAMILIES[name]), known or {}, dtype)
        tried[name] = _different(config, model)
        if name == "llama" and known is None and model.hidden_size % model.num_attention_heads:
            tried[name].append(
                f"model.head_size: got {model.head_size}, accepted: null, which llama needs"
            )
        if not tried[name]:
            return config, FAMILIES[name]
    nearest = min(tried.values(), key=len)
    raise CoatConfigError("\n".join(nearest))


def _different(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """A line for each key in which the model of a config.json is another."""
    try:
        read, family = model_from_config(dict(config), "config.json")
    except CoatConfigError as problem:
        return [str(problem)]
    lines = model.different(read, family.model_type)
    if read.seq_length < model.seq_length:
        lines.append(
            f"model.seq_length: got {model.seq_length}, accepted: at most {read.seq_length}"
        )
    return lines


def _described(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Every key of config.json that decides what the model computes."""
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{theirs: getattr(model, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": model.kv_heads,
        # Of another one the caller finds the difference.
        "hidden_act": acts.get(model.activation, "silu"),
        "initializer_range": model.init_std,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": float(model.rotary_base),
        # Transformers adds to it.
        "rope_scaling": None if model.rope_scaling is None else dict(model.rope_scaling),
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
    if not family.experts or model.num_moe_experts is None:
        return config
    config |= {theirs: getattr(model, ours) for theirs, ours in family.experts.items()}
    if "moe_intermediate_size" not in family.experts:
        return {**config, "intermediate_size": model.expert_size}
    return config | {
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(model.num_layers) if not model.has_experts(i)],
    }


def _with_dtype(
    config: Mapping[str, Any], like: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """``config`` with the dtype under the name that ``like`` uses: transformers 5 calls it
    ``dtype``, and reads the older name too.
    """
    rest = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return {
        **rest,
        "dtype" if "dtype" in like else "torch_dtype": str(dtype).removeprefix("torch."),
    }
