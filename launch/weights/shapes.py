"""The parameters of a model, whole: their names in Megatron and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coat_dist.reference.activation import ACTIVATIONS
from launch.model.gpt import ModelConfig
from launch.weights.source import CheckpointError

__all__ = ["check_shapes", "parameter_shapes"]

Shapes = Mapping[str, tuple[int, ...]]


def check_shapes(folder: Path, found: Shapes, wanted: Shapes, by: str, files: Mapping[str, Path] | None = None) -> None:
    """Whether a folder has the tensors of the model that ``by`` describes: of others, rows would be mixed up.

    Args:
        files: of the tensors, where they are known.

    Raises:
        CheckpointError: names the tensor and where it is.
    """
    for name in [*wanted, *found]:
        where = (files or {}).get(name, folder)
        if name not in found:
            raise CheckpointError(f"{where}: has no {name}, which the model by {by} has")
        if name not in wanted:
            raise CheckpointError(f"{where}: has {name}, which the model by {by} has not")
        if found[name] != wanted[name]:
            raise CheckpointError(f"{where}: {name}: got {list(found[name])}, accepted: {list(wanted[name])}, by {by}")


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole tensors by Megatron's names, in the order of the model.

    Experts have one fc1 and one fc2 each (``local_experts``), numbered over all ranks, however a model stores them.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (model.padded_vocab, model.hidden_size)}
    for i in range(model.num_layers):
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in _layer(model, i).items()}
    shapes |= _norm("decoder.final_layernorm", model, model.hidden_size, model.norm_affine)
    if not model.tie_embeddings:
        shapes["output_layer.weight"] = (model.padded_vocab, model.hidden_size)
    return shapes


def _layer(model: ModelConfig, i: int) -> dict[str, tuple[int, ...]]:
    h, d = model.hidden_size, model.head_channels
    qkv = d * (model.num_attention_heads + 2 * model.kv_heads)
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
    shapes |= _experts(model) if model.has_experts(i) else _mlp("mlp", model, model.ffn_hidden_size)
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
        shapes |= _norm(name, model, h, post)
    return shapes


def _mlp(name: str, model: ModelConfig, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    wide = inner * ACTIVATIONS[model.activation].parts
    for fc, shape in (("linear_fc1", (wide, model.hidden_size)), ("linear_fc2", (model.hidden_size, inner))):
        shapes[f"{name}.{fc}.weight"] = shape
        if model.linear_bias:
            shapes[f"{name}.{fc}.bias"] = shape[:1]
    return shapes


def _experts(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    assert model.num_moe_experts is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (model.num_moe_experts, model.hidden_size)}
    for expert in range(model.num_moe_experts):
        inner = model.moe_ffn_hidden_size or model.ffn_hidden_size
        shapes |= _mlp(f"mlp.experts.local_experts.{expert}", model, inner)
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        if model.moe_shared_expert_gate:
            shapes["mlp.shared_experts.gate_weight"] = (1, model.hidden_size)
        shapes |= _mlp("mlp.shared_experts", model, shared)
    return shapes


def _norm(name: str, model: ModelConfig, size: int, there: bool) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if model.normalization == "layernorm" else ("weight",)
    return {f"{name}.{kind}": (size,) for kind in kinds} if there else {}
