"""The Megatron-core GPT that a model description asks for."""

from __future__ import annotations

from typing import Any

import torch

from launch.model.model_config import EXPERT_KEYS, ModelConfig, load_model_config
from launch.model.rope import scale_rope
from launch.model.sizes import flops_per_token, parameter_count
from launch.model.stages import build_stage, pipeline

__all__ = ["ModelConfig", "build_model", "flops_per_token", "load_model_config", "parameter_count"]


def transformer_config(
    model: ModelConfig,
    *,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **extra: Any,
):
    """Megatron's ``TransformerConfig`` for ``model``; ``extra`` goes to it as it is (recompute
    settings).
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patches.layers.activations import megatron_activation

    function, gated = megatron_activation(model.activation)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_channels,
        normalization="RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm is True,
        gated_linear_unit=gated,
        activation_func=function,
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_std,
        **_expert_options(model, ep),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        gradient_accumulation_fusion=False,
        # The CPU initializes the whole weight and keeps its shard, so that all tensor-parallel
        # sizes start equal.
        use_cpu_initialization=not torch.cuda.is_available(),
        **extra,
    )


def _expert_options(model: ModelConfig, ep: int) -> dict[str, Any]:
    """Arguments of ``TransformerConfig`` with ``ep`` ranks that divide the experts; none for a
    dense model.
    """
    if model.num_moe_experts is None:
        return {}
    options = {key: getattr(model, key) for key in ("num_moe_experts", *EXPERT_KEYS)}
    if ep > 1:
        options |= {"expert_model_parallel_size": ep, "moe_token_dispatcher_type": "alltoall"}
    return options | {
        "moe_ffn_hidden_size": model.expert_size,
        "moe_router_load_balancing_type": "aux_loss",
    }


def layer_spec(model: ModelConfig, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's layers of ``model``; ``config`` is its :func:`transformer_config`."""
    from megatron_patches.layers.spec import gpt_layer_spec

    return gpt_layer_spec(
        config,
        vp_stage=vp_stage,
        affine=model.norm_affine,
        norm_placement=model.norm_placement,
        norm_all_heads=model.qk_norm == "full",
        attention_output_bias=model.attention_output_bias,
    )


def build_model(
    model: ModelConfig,
    *,
    tp: int = 1,
    ep: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **extra: Any,
) -> torch.nn.Module:
    """The GPT on this rank's device in ``dtype``. Model-parallel groups and seeds must be set up
    before.

    With pipeline stages it is this rank's stage, or with interleaved ones a ``ModuleList`` of its
    parts (``stages.py``). Initial weights are the same for every number of stages.

    ``tp`` ranks share each layer, ``ep`` ranks divide the experts. ``model(tokens, position_ids,
    None)`` with int64 ``[b, s]`` gives logits ``[b, s, padded_vocab / tp]``.
    """
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(
        model, tp=tp, ep=ep, sequence_parallel=sequence_parallel, dtype=dtype, **pipeline(), **extra
    )

    def build(vp_stage: int | None = None, **ends: bool) -> torch.nn.Module:
        built = GPTModel(
            config,
            layer_spec(model, config, vp_stage),
            vocab_size=model.padded_vocab,
            max_sequence_length=model.seq_length,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=model.tie_embeddings,
            vp_stage=vp_stage,
            **ends,
        )
        scale_rope(built, model.rope_scaling, model.rotary_base)
        return built.to(dtype).to("cuda" if torch.cuda.is_available() else "cpu")

    if config.pipeline_model_parallel_size == 1:
        return build()
    return build_stage(
        config, build, lambda whole: layer_spec(model, whole), model.padded_vocab, model.seq_length
    )


def router_losses(
    model: ModelConfig, tp: int, accumulation: int, stages: int = 1
) -> dict[str, torch.Tensor]:
    """Losses of this rank's routers since the last call, without their factors.

    Means over layers with experts and micro-batches; the mean over all ranks is what Megatron logs.

    Args:
        tp: tensor-parallel ranks, each of which has a part of the load-balancing loss.
        accumulation: micro-batches of a step.
        stages: of a pipeline, each of which adds up those of its own layers.
    """
    shares = {
        "load_balancing_loss": tp if model.moe_aux_loss_coeff else 0,
        "z_loss": int(bool(model.moe_z_loss_coeff)),
    }
    if model.num_moe_experts is None or not any(shares.values()):
        return {}
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    kept, found = get_moe_layer_wise_logging_tracker(), {}
    count = sum(map(model.has_experts, range(model.num_layers))) * accumulation
    for key, share in shares.items():
        if share:
            values = kept[key]["values"] if key in kept else torch.zeros(1)
            found["router_z_loss" if key == "z_loss" else key] = values.sum() * (
                share * stages / count
            )
            values.zero_()
    return found
