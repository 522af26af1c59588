"""Every field of Megatron's ``TransformerConfig``, in one table that says how it is treated here.

No field is ignored silently. Each one is honoured, refused, or recorded as without meaning, with the reason: in a
model that is built by :func:`~megatron_patches.gpt_layer_spec`, and in patched blocks. A field that the table lacks,
because megatron-core is newer, is refused where it is not at its default. ``config_check.py`` looks up a configuration.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

__all__ = ["FIELDS", "Field", "Handled", "Only"]


class Handled(Enum):
    """Treatments of a field that need no refusal by its value."""

    HONOURED = "has the effect that it has in Megatron's own modules"
    BY_BLOCK = "looked at by the why_bf16 function of the one block that it concerns, which may stay BF16"


class Only:
    """Every value but these is refused. None, False, 0 and "" count as one value."""

    def __init__(self, *accepted: Any) -> None:
        self.accepted = accepted

    def accepts(self, given: Any) -> bool:
        return any(given == value or not (given or value) for value in self.accepted)

    def __str__(self) -> str:
        return ", ".join(map(repr, self.accepted))


class Field(NamedTuple):
    """How a field is treated. A string means: without meaning, and says why."""

    built: Handled | Only | str
    """In a model from ``gpt_layer_spec``, not patched."""
    patched: Handled | Only | str
    """In patched blocks of any model."""


_YES, _BLOCK = Handled.HONOURED, Handled.BY_BLOCK
_OFF, _NONE = Only(False), Only(None)
_FP8 = "part of fp8, which is refused"
_FP4 = "part of fp4, which is refused"
_CP = "for context parallelism, which is refused"
_OVERLAP = "part of tp_comm_overlap"
_TE = "for modules of Transformer Engine"
_GROUPED = "for grouped products of Transformer Engine"
_VARIANT = "part of experimental_attention_variant, which is refused"
_MAMBA = "a GPT model has no Mamba layers"
_CLIP = "part of qk_clip, which is refused"
_NORM = "picks a kernel of another package; the norm here has one"
_UNREAD = "read by nothing in megatron-core"

_TABLE: tuple[tuple[str, Handled | Only | str, Handled | Only | str], ...] = (
    # Groups of ranks, and who holds which layers.
    (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "pipeline_model_parallel_comm_backend sequence_parallel expert_model_parallel_size "
        "expert_tensor_parallel_size num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        _YES,
        _YES,
    ),
    ("context_parallel_size", Only(1), _YES),
    ("hybrid_context_parallel", _OFF, _YES),
    ("hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type", _CP, _YES),
    # Read by Megatron's training loop, schedules and optimizer. Under DeepSpeed step_jobs.py does their work.
    (
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func enable_autocast "
        "autocast_dtype num_microbatches_with_partial_activation_checkpoints pipeline_dtype variable_seq_lengths "
        "overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs "
        "overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone barrier_with_L1_time "
        "use_te_rng_tracker inference_rng_tracker inference_sampling_seed init_model_with_meta_device "
        "hetereogenous_dist_checkpoint calculate_per_token_loss",
        _YES,
        _YES,
    ),
    ("async_tensor_model_parallel_allreduce", _UNREAD, _UNREAD),
    (
        "moe_extended_tp moe_token_dropping apply_residual_connection_post_layernorm use_inference_optimized_layers",
        _OFF,
        _UNREAD,
    ),
    # Types and initialization.
    ("params_dtype bf16", _YES, _YES),
    ("fp16", _YES, _OFF),
    ("fp32_residual_connection", _OFF, _OFF),
    (
        "perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std "
        "embedding_init_method embedding_init_method_std is_hybrid_model",
        _YES,
        _YES,
    ),
    ("deterministic_mode disable_bf16_reduced_precision_matmul", _YES, _YES),
    ("batch_invariant_mode", _OFF, _OFF),
    # FP8, FP4 and offloading by others.
    ("fp8", _NONE, _NONE),
    (
        "fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red "
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        _FP8,
        _FP8,
    ),
    ("fp4", _NONE, _NONE),
    ("fp4_recipe fp4_param fp4_quantizer_factory", _FP4, _FP4),
    ("use_kitchen use_kitchen_attention", _OFF, _OFF),
    ("kitchen_attention_backend", "part of use_kitchen_attention, which is refused", "as in a built model"),
    ("quant_recipe", _NONE, "for modules of other packages, which stay as they are"),
    ("cpu_offloading", _OFF, _OFF),
    (
        "cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering",
        "part of cpu_offloading, which is refused",
        "part of cpu_offloading, which is refused",
    ),
    ("fine_grained_activation_offloading", _YES, _OFF),
    ("offload_modules min_offloaded_tensor_size", _YES, "part of fine_grained_activation_offloading, which is refused"),
    # Sizes and the layer itself.
    (
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels hidden_dropout "
        "layernorm_epsilon add_bias_linear add_qkv_bias gated_linear_unit bias_dropout_fusion "
        "clone_scatter_output_in_embedding",
        _YES,
        _YES,
    ),
    ("activation_func bias_activation_fusion glu_linear_offset activation_func_clamp_value", _YES, _BLOCK),
    ("use_te_activation_func", _OFF, _BLOCK),
    ("activation_func_fp8_input_store", _YES, "patched MLPs keep FP8 in any case"),
    ("normalization", Only("LayerNorm", "RMSNorm"), _BLOCK),
    ("layernorm_zero_centered_gamma", _OFF, _BLOCK),
    ("persist_layer_norm memory_efficient_layer_norm", _NORM, _NORM),
    ("mlp_chunks_for_prefill", _YES, _YES),
    ("heterogeneous_block_specs", _OFF, _BLOCK),
    # Attention.
    ("attention_dropout softmax_scale qk_layernorm qk_l2_norm attention_output_gate", _YES, _YES),
    ("rotary_interleaved no_rope_freq mrope_section test_mode", _YES, _YES),
    ("apply_rope_fusion fused_single_qkv_rope", _YES, "picks Megatron's kernel; patched attention rotates by its own"),
    ("multi_latent_attention", _OFF, _BLOCK),
    ("experimental_attention_variant linear_attention_freq", _NONE, _BLOCK),
    (
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads",
        _VARIANT,
        "read by attention classes that stay BF16",
    ),
    # The core attention of a patched layer is the one it was built with.
    ("window_size", _NONE, _YES),
    ("window_attn_skip_freq", "part of window_size, which is refused", _YES),
    ("softmax_type", Only("vanilla"), _YES),
    ("qk_clip log_max_attention_logit", _OFF, _YES),
    ("qk_clip_alpha qk_clip_threshold", _CLIP, _YES),
    ("attention_backend", "picks a kernel of Transformer Engine; SDPA picks among PyTorch's", _YES),
    ("attention_softmax_in_fp32", "SDPA's softmax is fp32 in any case", _YES),
    ("apply_query_key_layer_scaling", "divides and multiplies by the same, for fp16 scores that SDPA never has", _YES),
    ("masked_softmax_fusion", "SDPA masks and takes the softmax in one kernel in any case", _YES),
    # Experts. Routers and dispatchers are Megatron's.
    (
        "num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size "
        "moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay moe_router_topk_limited_devices "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk "
        "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype "
        "moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing moe_aux_loss_coeff "
        "moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type moe_enable_deepep "
        "moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor "
        "moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute moe_permute_fusion "
        "moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms",
        _YES,
        _YES,
    ),
    ("moe_shared_expert_overlap", _YES, _BLOCK),
    ("moe_grouped_gemm", _YES, _BLOCK),
    ("moe_use_legacy_grouped_gemm use_fused_weighted_squared_relu", _GROUPED, "read by experts that stay BF16"),
    ("overlap_moe_expert_parallel_comm", _YES, _OFF),
    ("ep_overlap_early_attn_memory_release", _YES, "part of overlap_moe_expert_parallel_comm, which is refused"),
    # Recompute, loss, weight gradients.
    (
        "recompute_granularity recompute_method recompute_num_layers distribute_saved_activations recompute_modules",
        _YES,
        _YES,
    ),
    ("gradient_accumulation_fusion", _YES, _YES),
    ("delay_wgrad_compute", _OFF, _OFF),
    ("defer_embedding_wgrad_compute", _YES, _BLOCK),
    ("wgrad_deferral_limit", _YES, "part of defer_embedding_wgrad_compute, which leaves the loss plain"),
    ("cross_entropy_loss_fusion cross_entropy_fusion_impl", _YES, "the chunked loss has one kernel; honoured by plain"),
    ("mtp_num_layers mtp_loss_scaling_factor config_logger_dir", _YES, _BLOCK),
    # Communication and kernels of Transformer Engine, CUDA graphs, inference.
    ("tp_comm_overlap", _TE, _OFF),
    (
        "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad "
        "tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv "
        "tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
        _OVERLAP,
        _OVERLAP,
    ),
    ("disable_parameter_transpose_cache symmetric_ar_type", _TE, _TE),
    ("transformer_impl", Only("transformer_engine", "local"), _BLOCK),
    ("inference_fuse_tp_communication", _OFF, _OFF),
    ("flash_decode", _YES, _YES),
    ("cuda_graph_impl", _YES, Only("none")),
    ("enable_cuda_graph external_cuda_graph", _YES, _OFF),
    (
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope",
        _YES,
        "part of CUDA graphs, which are refused",
    ),
    ("mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path", _MAMBA, _MAMBA),
)

FIELDS: dict[str, Field] = {name: Field(built, patched) for names, built, patched in _TABLE for name in names.split()}
