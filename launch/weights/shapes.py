"""The parameters of a dense model, whole: their names in Megatron and their shapes."""

from __future__ import annotations

from coat_dist import CoatConfigError
from coat_dist.reference.activation import ACTIVATIONS
from launch.model.gpt import ModelConfig

__all__ = ["parameter_shapes"]


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole tensors by Megatron's names, in the order of the model.

    Raises:
        CoatConfigError: a model with experts.
    """
    if model.num_moe_experts is not None:
        raise CoatConfigError(f"model.num_moe_experts: got {model.num_moe_experts}, accepted: null (a dense model)")
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.padded_vocab, model.hidden_size)}
    for i in range(model.num_layers):
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in _layer(model).items()}
    shapes |= _norm("decoder.final_layernorm", model, model.hidden_size, model.norm_affine)
    if not model.tie_embeddings:
        shapes["output_layer.weight"] = (model.padded_vocab, model.hidden_size)
    return shapes


def _layer(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, d = model.hidden_size, model.head_channels
    qkv = d * (model.num_attention_heads + 2 * model.kv_heads)
    wide = model.ffn_hidden_size * ACTIVATIONS[model.activation].parts
    pre, post = (model.norm_affine and model.norm_placement == place for place in ("pre", "post"))
    shapes: dict[str, tuple[int, ...]] = _norm("input_layernorm", model, h, pre)
    shapes["self_attention.linear_proj.weight"] = (h, d * model.num_attention_heads)
    if model.linear_bias or model.attention_output_bias:
        shapes["self_attention.linear_proj.bias"] = (h,)
    shapes["self_attention.linear_qkv.weight"] = (qkv, h)
    if model.linear_bias or model.qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    for one, heads in (("q", model.num_attention_heads), ("k", model.kv_heads)):
        size = d * heads if model.qk_norm == "full" else d
        shapes |= _norm(f"self_attention.{one}_layernorm", model, size, model.qk_norm is not False)
    shapes |= _norm("pre_mlp_layernorm", model, h, pre)
    for name, shape in (("mlp.linear_fc1", (wide, h)), ("mlp.linear_fc2", (h, model.ffn_hidden_size))):
        shapes[f"{name}.weight"] = shape
        if model.linear_bias:
            shapes[f"{name}.bias"] = shape[:1]
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
        shapes |= _norm(name, model, h, post)
    return shapes


def _norm(name: str, model: ModelConfig, size: int, there: bool) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if model.normalization == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds} if there else {}
