"""The families of models that convert: one table each, read in both directions.

A table's line is ``Megatron's name: (layout, Hugging Face's names)``; ``{}`` is the layer's number
and ``{e}`` the expert's. Lines of parameters that a model does not have (biases, norms of queries
and keys, an output layer of its own) are left out for it. Layouts:

* ``same``: the same tensor.
* ``vocab``: the same, with rows of zeros up to ``ModelConfig.padded_vocab`` in Megatron.
* ``halves``: gate and up projection one above the other.
* ``qkv``: for each query group its queries, its key, its value: ``[q .. q k v | q .. q k v | ..]``.
  Both sides rotate halves of a head's channels, so rows within a head stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Line = tuple[str, tuple[str, ...]]
Table = Mapping[str, Line]


def _halves(
    module: str, one: str = "gate_proj", other: str = "up_proj", kind: str = "weight"
) -> Line:
    return "halves", (f"{module}.{one}.{kind}", f"{module}.{other}.{kind}")


def _lines(kind: str) -> Table:
    """Lines of weights, or of biases, of what all families have."""
    theirs, ours = "model.layers.{}.self_attn", "decoder.layers.{}.self_attention"
    return {
        f"{ours}.linear_qkv.{kind}": ("qkv", tuple(f"{theirs}.{one}_proj.{kind}" for one in "qkv")),
        f"{ours}.linear_proj.{kind}": ("same", (f"{theirs}.o_proj.{kind}",)),
        f"decoder.layers.{{}}.mlp.linear_fc1.{kind}": _halves("model.layers.{}.mlp", kind=kind),
        f"decoder.layers.{{}}.mlp.linear_fc2.{kind}": (
            "same",
            (f"model.layers.{{}}.mlp.down_proj.{kind}",),
        ),
    }


_LLAMA: Table = {
    "embedding.word_embeddings.weight": ("vocab", ("model.embed_tokens.weight",)),
    "decoder.layers.{}.input_layernorm.weight": (
        "same",
        ("model.layers.{}.input_layernorm.weight",),
    ),
    "decoder.layers.{}.pre_mlp_layernorm.weight": (
        "same",
        ("model.layers.{}.post_attention_layernorm.weight",),
    ),
    "decoder.layers.{}.self_attention.q_layernorm.weight": (
        "same",
        ("model.layers.{}.self_attn.q_norm.weight",),
    ),
    "decoder.layers.{}.self_attention.k_layernorm.weight": (
        "same",
        ("model.layers.{}.self_attn.k_norm.weight",),
    ),
    **_lines("weight"),
    **_lines("bias"),
    "decoder.final_layernorm.weight": ("same", ("model.norm.weight",)),
    "output_layer.weight": ("vocab", ("lm_head.weight",)),
}

_OLMO2: Table = {
    **_LLAMA,
    "decoder.layers.{}.post_self_attn_layernorm.weight": (
        "same",
        ("model.layers.{}.post_attention_layernorm.weight",),
    ),
    "decoder.layers.{}.post_mlp_layernorm.weight": (
        "same",
        ("model.layers.{}.post_feedforward_layernorm.weight",),
    ),
}

_EXPERT = "decoder.layers.{}.mlp.experts.local_experts.{e}"
_SHARED = "decoder.layers.{}.mlp.shared_experts"

_MIXTRAL: Table = {
    **_LLAMA,
    "decoder.layers.{}.mlp.router.weight": (
        "same",
        ("model.layers.{}.block_sparse_moe.gate.weight",),
    ),
    f"{_EXPERT}.linear_fc1.weight": _halves(
        "model.layers.{}.block_sparse_moe.experts.{e}", "w1", "w3"
    ),
    f"{_EXPERT}.linear_fc2.weight": (
        "same",
        ("model.layers.{}.block_sparse_moe.experts.{e}.w2.weight",),
    ),
}

_QWEN_MOE: Table = {
    **_LLAMA,
    "decoder.layers.{}.mlp.router.weight": ("same", ("model.layers.{}.mlp.gate.weight",)),
    f"{_EXPERT}.linear_fc1.weight": _halves("model.layers.{}.mlp.experts.{e}"),
    f"{_EXPERT}.linear_fc2.weight": ("same", ("model.layers.{}.mlp.experts.{e}.down_proj.weight",)),
    f"{_SHARED}.gate_weight": ("same", ("model.layers.{}.mlp.shared_expert_gate.weight",)),
    f"{_SHARED}.linear_fc1.weight": _halves("model.layers.{}.mlp.shared_expert"),
    f"{_SHARED}.linear_fc2.weight": (
        "same",
        ("model.layers.{}.mlp.shared_expert.down_proj.weight",),
    ),
}


def _fused(table: Table) -> Mapping[str, tuple[str, ...]]:
    """How ``save_pretrained(save_original_format=False)`` of transformers 5 names the same tensors:
    those of a layer's experts stacked in one.
    """
    mlp = "model.layers.{}.mlp"
    return {
        f"{mlp}.gate.weight": table["decoder.layers.{}.mlp.router.weight"][1],
        f"{mlp}.experts.gate_up_proj": table[f"{_EXPERT}.linear_fc1.weight"][1],
        f"{mlp}.experts.down_proj": table[f"{_EXPERT}.linear_fc2.weight"][1],
    }


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to one ``model_type`` of transformers."""

    model_type: str
    architecture: str
    """The class in transformers."""
    table: Table = field(default_factory=lambda: _LLAMA)
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``ModelConfig`` that every model of the family has, and config.json does not say."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for keys that config.json does not have."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json of which one value, or a few, can be honoured: they change what the
    model computes.
    """
    says: frozenset[str] = frozenset()
    """Further keys that are honoured: "bias" (attention_bias with mlp_bias), "norm_eps",
    "sliding_window", "use_sliding_window", "qkv_bias"; with "head_dim" that key, which all families
    may have, is always written.
    """
    experts: Mapping[str, str] = field(default_factory=dict)
    """Keys of a family with experts, and what ``ModelConfig`` calls them."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of stacked tensors, and of those that they are stacks of."""


_ABSENT = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.001,
}

_EVERY = {"num_experts_per_tok": "moe_router_topk", "router_aux_loss_coef": "moe_aux_loss_coeff"}
_QWEN_EXPERTS = {
    "num_experts": "num_moe_experts",
    **_EVERY,
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
_EVERY_LAYER = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}

_ALL = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        absent={**_ABSENT, "max_position_embeddings": 2048},
        says=frozenset({"head_dim", "bias", "norm_eps"}),
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        absent={
            **_ABSENT,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        says=frozenset({"head_dim", "norm_eps", "sliding_window"}),
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        implies={"qkv_bias": True},
        absent={**_ABSENT, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        says=frozenset({"norm_eps", "use_sliding_window"}),
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        implies={"qk_norm": True},
        absent={
            **_ABSENT,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "head_dim": 128,
        },
        only={"attention_bias": (False,)},
        says=frozenset({"head_dim", "norm_eps", "use_sliding_window"}),
    ),
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        implies={"normalization": "layernorm", "norm_affine": False, "norm_eps": 1e-5},
        absent={**_ABSENT, "max_position_embeddings": 2048},
        only={"attention_bias": (False,), "clip_qkv": (None,)},
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        table=_OLMO2,
        implies={"norm_placement": "post", "qk_norm": "full"},
        absent={**_ABSENT, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        only={"attention_bias": (False,)},
        says=frozenset({"norm_eps"}),
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        table=_MIXTRAL,
        fused=_fused(_MIXTRAL),
        experts={"num_local_experts": "num_moe_experts", **_EVERY},
        absent={
            **_ABSENT,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        only={"router_jitter_noise": (None, 0, 0.0)},
        says=frozenset({"head_dim", "norm_eps", "sliding_window"}),
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        table=_QWEN_MOE,
        fused=_fused(_QWEN_MOE),
        experts={
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        implies={"moe_shared_expert_gate": True},
        absent={
            **_ABSENT,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            **_EVERY_LAYER,
        },
        says=frozenset({"norm_eps", "use_sliding_window", "qkv_bias"}),
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        table=_QWEN_MOE,
        fused=_fused(_QWEN_MOE),
        experts=_QWEN_EXPERTS,
        implies={"qk_norm": True},
        absent={
            **_ABSENT,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            **_EVERY_LAYER,
        },
        only={"attention_bias": (False,)},
        says=frozenset({"head_dim", "norm_eps", "use_sliding_window"}),
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""By ``model_type`` of config.json."""
