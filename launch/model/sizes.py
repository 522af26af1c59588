"""Shapes of a model's parameters, how many there are, and how much a token computes."""

from __future__ import annotations

from math import prod

from coat_dist.reference.activation import ACTIVATIONS
from launch.model.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, the vocabulary's padding included."""
    return sum(map(prod, parameter_shapes(model).values()))


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Floating-point operations of forward and backward for one token.

    Two a weight and pass, three passes (forward, dgrad, wgrad), and attention's two products over
    the causal half of the sequence. Recomputation is not counted. Of the experts, only those chosen
    for a token count.
    """
    matrices = {
        n: prod(s)
        for n, s in parameter_shapes(model).items()
        if n.startswith("decoder") and len(s) == 2
    }
    experts = sum(size for name, size in matrices.items() if ".local_experts." in name)
    weights = sum(matrices.values()) - experts + model.hidden_size * model.padded_vocab
    weights += experts * model.moe_router_topk // (model.num_moe_experts or 1)
    attention = 2 * seq_length * model.num_attention_heads * model.head_channels  # half of the keys
    return 3.0 * (2 * weights + model.num_layers * attention)


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Shapes of the whole tensors by Megatron's names, in the order of the model.

    Experts have one fc1 and one fc2 each (``local_experts``), numbered over all ranks, however a
    model stores them.
    """
    shapes: Shapes = {"embedding.word_embeddings.weight": (model.padded_vocab, model.hidden_size)}
    for i in range(model.num_layers):
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in _layer(model, i).items()}
    if model.norm_affine:
        shapes |= _norm("decoder.final_layernorm", model, model.hidden_size)
    if not model.tie_embeddings:
        shapes["output_layer.weight"] = (model.padded_vocab, model.hidden_size)
    return shapes


def _layer(model: ModelConfig, i: int) -> Shapes:
    h, d = model.hidden_size, model.head_channels
    qkv = d * (model.num_attention_heads + 2 * model.kv_heads)
    pre, post = (model.norm_affine and model.norm_placement == place for place in ("pre", "post"))
    shapes: Shapes = _norm("input_layernorm", model, h) if pre else {}
    shapes["self_attention.linear_proj.weight"] = (h, d * model.num_attention_heads)
    if model.linear_bias or model.attention_output_bias:
        shapes["self_attention.linear_proj.bias"] = (h,)
    shapes["self_attention.linear_qkv.weight"] = (qkv, h)
    if model.linear_bias or model.qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    for one, heads in (("q", model.num_attention_heads), ("k", model.kv_heads)):
        if model.qk_norm:
            size = d * heads if model.qk_norm == "full" else d
            shapes |= _norm(f"self_attention.{one}_layernorm", model, size)
    if pre:
        shapes |= _norm("pre_mlp_layernorm", model, h)
    if model.has_experts(i):
        shapes |= _experts(model)
    else:
        shapes |= _mlp("mlp", model, model.ffn_hidden_size)
    if post:
        shapes |= _norm("post_self_attn_layernorm", model, h) | _norm(
            "post_mlp_layernorm", model, h
        )
    return shapes


def _mlp(name: str, model: ModelConfig, inner: int) -> Shapes:
    shapes: Shapes = {}
    wide = inner * ACTIVATIONS[model.activation].parts
    for fc, shape in (
        ("linear_fc1", (wide, model.hidden_size)),
        ("linear_fc2", (model.hidden_size, inner)),
    ):
        shapes[f"{name}.{fc}.weight"] = shape
        if model.linear_bias:
            shapes[f"{name}.{fc}.bias"] = shape[:1]
    return shapes


def _experts(model: ModelConfig) -> Shapes:
    assert model.num_moe_experts is not None
    shapes: Shapes = {"mlp.router.weight": (model.num_moe_experts, model.hidden_size)}
    experts = (f"mlp.experts.local_experts.{expert}" for expert in range(model.num_moe_experts))
    # All of one kind, then all of the next: as grouped tensors have them, so that each is read
    # once.
    for of_all in zip(
        *(_mlp(name, model, model.expert_size).items() for name in experts), strict=True
    ):
        shapes |= dict(of_all)
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        if model.moe_shared_expert_gate:
            shapes["mlp.shared_experts.gate_weight"] = (1, model.hidden_size)
        shapes |= _mlp("mlp.shared_experts", model, shared)
    return shapes


def _norm(name: str, model: ModelConfig, size: int) -> Shapes:
    kinds = ("weight", "bias") if model.normalization == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds}
