"""config.json to ``ModelConfig``: keys that are honoured, keys without meaning here, and keys
that are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coat_dist import CoatConfigError
from coat_dist.config import explain, load_json
from launch.convert.families import FAMILIES, Family
from launch.model.model_config import ModelConfig

SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "seq_length",
}
"""Keys that every config.json has, and their names in ``ModelConfig``."""
ACTIVATION_NAMES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "quick_gelu": "quick_geglu",
}
"""``hidden_act`` of a gated MLP, and the activation in ``ModelConfig``."""
_NULLS = ("sliding_window", "num_key_value_heads")
"""Keys whose null is not the same as a key that is absent."""
_OF_EXPERTS = ("num_experts", "num_local_experts", "moe_intermediate_size")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_OF_EXPERTS, "n_routed_experts"), (None, 0)),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "partial_rotary_factor": (None, 1),
    "is_causal": (None, True),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
}
"""Keys that would change what a model computes, and the values with which they do not."""


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        CoatConfigError: the file cannot be read.
    """
    try:
        return load_json(path)
    except CoatConfigError as problem:
        raise CoatConfigError(f"{path}: {problem}") from None


def model_from_config(values: dict[str, Any], where: str) -> tuple[ModelConfig, Family]:
    """The model that a config.json describes, and its family.

    Args:
        values: the file's content.
        where: its name, for errors.

    Raises:
        CoatConfigError: a key that cannot be honoured; names each such key.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        kind = json.dumps(values.get("model_type"))
        raise CoatConfigError(f"{where}: model_type: got {kind}, accepted: {', '.join(FAMILIES)}")
    own = next((name for name in _OF_EXPERTS[:2] if name in family.experts), None)
    if own is not None:  # transformers 4 and 5 have two names for it
        values = {
            **values,
            own: next(
                (values[n] for n in (own, *_OF_EXPERTS[:2]) if values.get(n) is not None), None
            ),
        }
    given = {**family.absent, **{k: v for k, v in values.items() if v is not None or k in _NULLS}}
    problems = _refused(values, given, family)
    problems += [f"{key}: missing, accepted: an integer" for key in SIZES if given.get(key) is None]
    if problems:
        raise CoatConfigError("\n".join(f"{where}: {line}" for line in problems))
    described = {
        **{ours: given[theirs] for theirs, ours in SIZES.items()},
        "num_query_groups": given["num_key_value_heads"],
        "activation": ACTIVATION_NAMES[given["hidden_act"]],
        "tie_embeddings": given["tie_word_embeddings"],
        "init_std": given["initializer_range"],
        "attention_dropout": given["attention_dropout"],
        **family.implies,
        **_experts(given, family),
        **_rope(values, family.absent.get("rope_theta", 10000.0)),
    }
    if "norm_eps" in family.says:
        described["norm_eps"] = given["rms_norm_eps"]
    if "qkv_bias" in family.says:
        described["qkv_bias"] = given["qkv_bias"]
    head, heads = given.get("head_dim"), given["num_attention_heads"]
    if head is not None and head * heads != given["hidden_size"]:
        described["head_size"] = head
    if "bias" in family.says and given.get("attention_bias"):
        every = bool(given.get("mlp_bias"))
        described |= (
            {"linear_bias": True} if every else {"qkv_bias": True, "attention_output_bias": True}
        )
    if (window := _window(given, family)) is not None:
        # Attention within a window is all attention in sequences that are no longer than it.
        described |= {"sliding_window": window, "seq_length": min(described["seq_length"], window)}
    try:
        return ModelConfig.model_validate(described), family
    except ValidationError as error:
        lines = [str(explain(f"{where}: model", ModelConfig, e)) for e in error.errors()]
        raise CoatConfigError("\n".join(lines)) from None


def _refused(values: dict[str, Any], given: dict[str, Any], family: Family) -> list[str]:
    """A line for every key that cannot be honoured."""
    accepted = {k: v for k, v in _NEUTRAL.items() if not (family.experts and k in _OF_EXPERTS)} | {
        "architectures": (None, [], [family.architecture]),
        "hidden_act": tuple(ACTIVATION_NAMES),
        **family.only,
    }
    if "bias" in family.says and not given.get("attention_bias"):
        accepted["mlp_bias"] = (None, False)
    found = {
        **(values.get("rope_parameters") or {}),
        **(values.get("rope_scaling") or {}),
        **values,
    }
    found["hidden_act"] = given["hidden_act"]
    lines = [
        f"{key}: got {json.dumps(found[key])}, accepted: {' or '.join(map(json.dumps, good))}"
        for key, good in accepted.items()
        if key in found and found[key] not in good
    ]
    usual = ["full_attention"]
    if "use_sliding_window" in family.says and values.get("use_sliding_window"):
        usual.append("sliding_attention")  # see _window
    if others := set(values.get("layer_types") or ()) - {*usual}:
        lines.append(
            f"layer_types: got {', '.join(sorted(others))}, accepted: {' or '.join(usual)} in "
            "every layer"
        )
    return lines


def _experts(given: dict[str, Any], family: Family) -> dict[str, Any]:
    if not family.experts:
        return {}
    described = {ours: given[theirs] for theirs, ours in family.experts.items()}
    described["moe_aux_loss_coeff"] = float(described["moe_aux_loss_coeff"])
    described["moe_router_pre_softmax"] = not given.get("norm_topk_prob", True)
    step, dense = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers") or ()
    layers = [
        int((i + 1) % step == 0 and i not in dense) for i in range(given["num_hidden_layers"])
    ]
    return described if all(layers) else {**described, "moe_layer_freq": layers}


def _rope(values: dict[str, Any], usual: float) -> dict[str, Any]:
    """``rotary_base`` and ``rope_scaling``: transformers 4 has ``rope_theta`` and ``rope_scaling``,
    transformers 5 both in ``rope_parameters``. Of a file with either, transformers 4 and 5 read
    ``rope_scaling``.
    """
    scaling = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    scaling.pop("partial_rotary_factor", None)
    theta = scaling.pop("rope_theta", None) or values.get("rope_theta") or usual
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default" or not scaling:
        return {"rotary_base": theta}
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"  # one beside it wins
        scaling[key] = values.get(key) or scaling.get(key) or values.get("max_position_embeddings")
    return {"rotary_base": theta, "rope_scaling": scaling}


def _window(given: dict[str, Any], family: Family) -> int | None:
    if "sliding_window" in family.says:
        return given["sliding_window"]
    if "use_sliding_window" in family.says and given.get("use_sliding_window"):
        # Families with experts differ in the layers that have one, so that it counts for all.
        slides = (
            bool(family.experts) or given.get("max_window_layers", 28) < given["num_hidden_layers"]
        )
        if given.get("layer_types"):
            slides = "sliding_attention" in given["layer_types"]
        return given.get("sliding_window", 4096) if slides else None
    return None
