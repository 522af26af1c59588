"""config.json to ``ModelConfig``: what is honoured, what has no meaning here, and what is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coat_dist import CoatConfigError
from coat_dist.config import explain, load_json
from launch.hf.experts import read_experts, refused_experts, with_their_names
from launch.hf.families import FAMILIES, Family
from launch.model.gpt import ModelConfig

__all__ = ["ACTIVATION_NAMES", "model_from_config", "read_config"]

ACTIVATION_NAMES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "quick_gelu": "quick_geglu",
}
"""``hidden_act`` of the gate, and what the gated MLP is called in a model description."""

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}

_NULLS = ("sliding_window", "num_key_value_heads")
"""Keys whose null is not the same as a key that is absent."""
_BOOLEANS = ("attention_bias", "qkv_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_COUNTS = (*_SIZES, "max_position_embeddings", "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")
_OF_EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "no_rope_layers": (None, []),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "alibi": (None, False),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "clip_qkv": (None,),
    "hidden_dropout": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "auto_map": (None, {}),
    "pruned_heads": (None, {}),
}
"""Keys that would change what a model computes, and the values with which they do not."""


def read_config(path: Path) -> tuple[ModelConfig, Family]:
    """What model a config.json describes, and of which family it is.

    Raises:
        CoatConfigError: the file cannot be read, or a key of it cannot be honoured; names each such key.
    """
    try:
        values = load_json(path)
    except CoatConfigError as problem:
        raise CoatConfigError(f"{path}: {str(problem).removeprefix('config: ')}") from None
    return model_from_config(values, str(path))


def model_from_config(values: dict[str, Any], where: str) -> tuple[ModelConfig, Family]:
    """See :func:`read_config`.

    Args:
        values: the file's content.
        where: its name, for errors.
    """
    family = _family(values, where)
    problems = list(_refused(values, family))
    values = with_their_names(values, family)
    given = {**family.absent, **{k: v for k, v in values.items() if v is not None or k in _NULLS}}
    sizes = {key: given.get(key) for key in (*_SIZES, "max_position_embeddings")}
    problems += [f"{key}: missing, accepted: a whole number" for key, value in sizes.items() if value is None]
    if problems:
        raise CoatConfigError("\n".join(f"{where}: {line}" for line in problems))
    described: dict[str, Any] = {ours: given[theirs] for theirs, ours in _SIZES.items()}
    described |= {
        "num_query_groups": given["num_key_value_heads"] or given["num_attention_heads"],  # null: as many
        "seq_length": given["max_position_embeddings"],
        "activation": ACTIVATION_NAMES[given["hidden_act"]],
        "tie_embeddings": given["tie_word_embeddings"],
        "init_std": given["initializer_range"],
        "attention_dropout": given["attention_dropout"],
        **family.implies,
        **read_experts(given, family),
    }
    if "norm_eps" in family.says:
        described["norm_eps"] = given["rms_norm_eps"]
    if "qkv_bias" in family.says:
        described["qkv_bias"] = given["qkv_bias"]
    head, heads = given.get("head_dim"), described["num_attention_heads"]
    if head is not None and head * heads != described["hidden_size"]:
        described["head_size"] = head
    if "bias" in family.says and given.get("attention_bias"):
        described |= (
            {"linear_bias": True} if given.get("mlp_bias") else {"qkv_bias": True, "attention_output_bias": True}
        )
    described |= _rope(values, family.absent.get("rope_theta", 10000.0))
    if (window := _window(given, family)) is not None:
        # Attention within a window is all attention in sequences that are no longer than it.
        described |= {"sliding_window": window, "seq_length": min(described["seq_length"], window)}
    try:
        return ModelConfig.model_validate(described), family
    except ValidationError as error:
        lines = [_in_their_words(str(explain("model", ModelConfig, e))) for e in error.errors()]
        raise CoatConfigError("\n".join(f"{where}: {line}" for line in lines)) from None


def _family(values: dict[str, Any], where: str) -> Family:
    known = ", ".join(FAMILIES)
    kind, architectures = values.get("model_type"), values.get("architectures")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CoatConfigError(f"{where}: model_type: got {json.dumps(kind)}, accepted: {known}")
    family = FAMILIES[kind]
    if architectures and architectures != [family.architecture]:
        raise CoatConfigError(
            f'{where}: architectures: got {json.dumps(architectures)}, accepted: ["{family.architecture}"]'
        )
    return family


def _refused(values: dict[str, Any], family: Family) -> list[str]:
    """A line for every key that cannot be honoured."""
    lines = []
    accepted = {**{k: v for k, v in _NEUTRAL.items() if not (family.experts and k in _OF_EXPERTS)}, **family.only}
    if "bias" in family.says:
        accepted["mlp_bias"] = (None, False, True) if values.get("attention_bias") else (None, False)
    for key, good in accepted.items():
        if key in values and values[key] not in good:
            shown = " or ".join(dict.fromkeys(json.dumps(one) for one in good if one not in (None, [], {}))) or "null"
            lines.append(f"{key}: got {json.dumps(values[key])}, accepted: {shown}")
    for key in _BOOLEANS:
        if values.get(key) not in (None, False, True):
            lines.append(f"{key}: got {json.dumps(values[key])}, accepted: true or false")
    unused = "use_sliding_window" in family.says and not values.get("use_sliding_window")
    if "norm_eps" in family.says and "rms_norm_eps" in values and values["rms_norm_eps"] is None:
        lines.append("rms_norm_eps: got null, accepted: a number above 0")  # transformers fails on it
    for key in _COUNTS:
        value = values.get(key)
        least = 0 if key == "max_window_layers" or (key == "sliding_window" and unused) else 1
        if value is not None and (type(value) is not int or value < least):
            lines.append(f"{key}: got {json.dumps(value)}, accepted: an integer of at least {least}")
    lines += refused_experts(values, family)
    act = "silu" if values.get("hidden_act") is None else values["hidden_act"]
    if not isinstance(act, str) or act not in ACTIVATION_NAMES:
        lines.append(f"hidden_act: got {json.dumps(act)}, accepted: {', '.join(ACTIVATION_NAMES)}")
    kinds = values.get("layer_types")
    usual = ["full_attention"]
    if "use_sliding_window" in family.says and values.get("use_sliding_window"):
        usual.append("sliding_attention")  # see _window
    if kinds is not None and not (isinstance(kinds, list) and all(kind in usual for kind in kinds)):
        unusual = sorted({json.dumps(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])})
        lines.append(f"layer_types: got {', '.join(unusual)}, accepted: {' or '.join(usual)} in every layer")
    for key in ("rope_scaling", "rope_parameters"):
        value = values.get(key)
        if value is not None and (not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values())):
            lines.append(f"{key}: got {json.dumps(value)}, accepted: null or one object for all layers")
        elif value and value.get("partial_rotary_factor", 1) != 1:
            lines.append(f"{key}.partial_rotary_factor: got {value['partial_rotary_factor']}, accepted: 1")
    return lines


def _rope(values: dict[str, Any], usual: float) -> dict[str, Any]:
    """``rotary_base`` and ``rope_scaling``: transformers 4 has ``rope_theta`` and ``rope_scaling``, transformers 5 both
    in ``rope_parameters``. Of a file with either, transformers 4 and 5 read ``rope_scaling``."""
    scaling = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    scaling.pop("partial_rotary_factor", None)
    theta = next((t for t in (scaling.pop("rope_theta", None), values.get("rope_theta")) if t is not None), usual)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default"):
        # transformers reads a lone {"factor": ...} as no scaling at all.
        unread = {k: v for k, v in scaling.items() if k not in ("rope_type", "type") and v is not None}
        if unread and kind is None:
            return {"rotary_base": theta, "rope_scaling": scaling}  # refused there, for it lacks its type
        return {"rotary_base": theta}
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        if values.get(key) is not None:  # one beside it wins
            scaling[key] = values[key]
        elif scaling.get(key) is None:
            scaling[key] = values.get("max_position_embeddings")
    return {"rotary_base": theta, "rope_scaling": scaling}


def _window(given: dict[str, Any], family: Family) -> int | None:
    if "sliding_window" in family.says:
        return given["sliding_window"]
    if "use_sliding_window" in family.says and given.get("use_sliding_window"):
        # Families with experts differ in the layers that have one, so that it counts for all.
        slides = bool(family.experts) or given.get("max_window_layers", 28) < given["num_hidden_layers"]
        if given.get("layer_types"):
            slides = "sliding_attention" in given["layer_types"]
        return given.get("sliding_window", 4096) if slides else None
    return None


def _in_their_words(line: str) -> str:
    """An error of ``ModelConfig`` with config.json's names."""
    names = {
        **{ours: theirs for theirs, ours in _SIZES.items()},
        "num_query_groups": "num_key_value_heads",
        "seq_length": "max_position_embeddings",
        "head_size": "head_dim",
        "norm_eps": "rms_norm_eps",
        "rotary_base": "rope_theta",
        "tie_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
        "num_moe_experts": "num_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_aux_loss_coeff": "router_aux_loss_coef",
    }
    line = line.removeprefix("model.")
    key, dot, rest = line.partition(":")
    return names.get(key, key) + dot + rest
