"""Another value for every field of TransformerConfig, and what is expected of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.transformer import TransformerConfig

DECLARED = {f.name: f for f in dataclasses.fields(TransformerConfig)}
HIDDEN, VOCAB, SEQ = 64, 64, 16
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    num_attention_heads=4,
    ffn_hidden_size=96,
    init_method_std=0.15,  # large, so that attention matters
    bf16=False,
    params_dtype=torch.float32,
    pipeline_dtype=torch.float32,
)
EXPERTS: dict[str, Any] = dict(num_moe_experts=4, moe_ffn_hidden_size=48)
SELECTIVE: dict[str, Any] = dict(
    recompute_granularity="selective", recompute_modules=["core_attn"], moe_layer_recompute=True
)
# A model that is built sets these.
KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
WINDOW: dict[str, Any] = dict(window_size=(3, 0))


def _uniform(weight: torch.Tensor) -> None:
    torch.nn.init.uniform_(weight, -0.2, 0.2)


# Fields that change what a model computes: what is set, for GPTModel under "gpt". Alone where there
# is one key.
_EFFECT: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "kv_channels": 32,
    "hidden_dropout": 0.3,
    "attention_dropout": 0.3,
    "layernorm_epsilon": 0.5,
    "normalization": "LayerNorm",
    "params_dtype": dict(bf16=True, params_dtype=torch.bfloat16),
    "bf16": dict(bf16=True, params_dtype=torch.bfloat16),
    "init_method": _uniform,
    "output_layer_init_method": _uniform,
    "init_method_std": 0.1,
    "embedding_init_method": _uniform,
    "embedding_init_method_std": 1.0,
    "is_hybrid_model": True,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "gated_linear_unit": dict(gated_linear_unit=False, activation_func=F.gelu),
    "activation_func": quick_gelu,
    "bias_activation_fusion": dict(bias_activation_fusion=True, activation_func=F.gelu),
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": dict(
        activation_func_clamp_value=0.5, activation_func=quick_gelu
    ),
    "softmax_scale": 0.7,
    "qk_layernorm": True,
    "qk_l2_norm": True,
    "attention_output_gate": True,
    "test_mode": dict(test_mode=True, qk_layernorm=True, normalization="LayerNorm"),
    "rotary_interleaved": True,
    "no_rope_freq": [0, 1],
    "mrope_section": dict(mrope_section=[2, 3, 3], gpt=dict(position_embedding_type="mrope")),
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": EXPERTS,
    "moe_layer_freq": dict(moe_layer_freq=[0, 1]) | EXPERTS,
    "moe_shared_expert_intermediate_size": dict(moe_shared_expert_intermediate_size=32) | EXPERTS,
    "moe_shared_expert_gate": dict(
        moe_shared_expert_gate=True, moe_shared_expert_intermediate_size=32
    )
    | EXPERTS,
    "moe_router_topk": dict(moe_router_topk=3) | EXPERTS,
    "moe_router_load_balancing_type": dict(
        moe_router_load_balancing_type="sinkhorn", moe_router_topk=1
    )
    | EXPERTS,
    "moe_router_group_topk": dict(moe_router_num_groups=2, moe_router_group_topk=1) | EXPERTS,
    "moe_router_num_groups": dict(moe_router_num_groups=2, moe_router_group_topk=1) | EXPERTS,
    "moe_router_pre_softmax": dict(moe_router_pre_softmax=True) | EXPERTS,
    "moe_router_topk_scaling_factor": dict(
        moe_router_topk_scaling_factor=2.0, moe_router_pre_softmax=True
    )
    | EXPERTS,
    "moe_router_score_function": dict(moe_router_score_function="sigmoid") | EXPERTS,
    "moe_router_enable_expert_bias": dict(
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"
    )
    | EXPERTS,
    "moe_input_jitter_eps": dict(moe_input_jitter_eps=0.1) | EXPERTS,
    "moe_router_force_load_balancing": dict(moe_router_force_load_balancing=True) | EXPERTS,
    "moe_apply_probs_on_input": dict(
        moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True
    )
    | EXPERTS,
}
EFFECT: dict[str, dict[str, Any]] = {
    name: given if isinstance(given, dict) else {name: given} for name, given in _EFFECT.items()
}
# Fields of core attention that SDPA does not have: our spec refuses them, and they are tried on
# models of Megatron's.
CORE: dict[str, dict[str, Any]] = {
    "window_size": WINDOW,
    "window_attn_skip_freq": dict(window_attn_skip_freq=2) | WINDOW,
    "softmax_type": dict(softmax_type="off-by-one"),
}
_TURNED = """
    use_cpu_initialization deterministic_mode enable_autocast use_te_rng_tracker
    cross_entropy_loss_fusion overlap_p2p_comm batch_p2p_comm
    batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
    barrier_with_L1_time mtp_standalone calculate_per_token_loss init_model_with_meta_device
    disable_bf16_reduced_precision_matmul distribute_saved_activations
    moe_enable_routing_replay moe_per_layer_logging cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph clone_scatter_output_in_embedding inference_rng_tracker
    hetereogenous_dist_checkpoint activation_func_fp8_input_store"""
_FUNCTIONS = (
    *("grad_scale_func", "finalize_model_grads_func"),
    *("no_sync_func", "grad_sync_func", "param_sync_func"),
)
# Fields that change nothing in the forward pass of one rank, set all at once. Booleans are turned
# around.
INERT: dict[str, Any] = dict(
    pipeline_model_parallel_comm_backend="gloo",
    pipeline_dtype=torch.bfloat16,
    autocast_dtype=torch.bfloat16,
    microbatch_group_size_per_vp_stage=2,
    num_microbatches_with_partial_activation_checkpoints=1,
    mtp_loss_scaling_factor=0.5,
    wgrad_deferral_limit=2,
    config_logger_dir="",
    cuda_graph_scope=[],
    cuda_graph_warmup_steps=1,
    offload_modules=["core_attn"],
    min_offloaded_tensor_size=7,
    inference_sampling_seed=7,
    mlp_chunks_for_prefill=2,
    cross_entropy_fusion_impl="te",
    moe_router_bias_update_rate=0.1,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.1,
    moe_router_dtype="fp32",
    moe_flex_dispatcher_backend="hybridep",
    moe_token_drop_policy="position",
    moe_deepep_num_sms=4,
    moe_hybridep_num_sms=4,
    **dict.fromkeys(_FUNCTIONS, lambda *args, **kwargs: None),
    **EXPERTS,
) | {key: not DECLARED[key].default for key in _TURNED.split() if key in DECLARED}
