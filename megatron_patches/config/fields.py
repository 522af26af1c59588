"""Every field of Megatron's ``TransformerConfig``, by what happens where a value is set.

No field is ignored silently. A field with a row in :data:`ACCEPTED` is refused at any other value:
in a model that :func:`~megatron_patches.gpt_layer_spec` builds, or in patched blocks of any model.
The others are honoured, or have no meaning here. Some concern one block alone: its recognizer looks
at them (``patch/recognize.py``). A field that is not in :data:`KNOWN`, because megatron-core is
newer, is refused where it is not at its default. ``config_check.py`` looks up a configuration.
"""

from __future__ import annotations

from typing import Any


def _each(names: str, accepted: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), (accepted,))


_OFF = {
    **_each("fp8 fp4", None),
    **_each(
        """
        fp32_residual_connection batch_invariant_mode use_kitchen use_kitchen_attention
        cpu_offloading delay_wgrad_compute inference_fuse_tp_communication
        """,
        False,
    ),
}
ACCEPTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "built": {
        **_OFF,
        "context_parallel_size": (1,),
        "normalization": ("LayerNorm", "RMSNorm"),
        "softmax_type": ("vanilla",),
        "transformer_impl": ("transformer_engine", "local"),
        **_each(
            "quant_recipe experimental_attention_variant linear_attention_freq window_size", None
        ),
        **_each(
            """
            hybrid_context_parallel moe_extended_tp moe_token_dropping
            apply_residual_connection_post_layernorm use_inference_optimized_layers
            use_te_activation_func layernorm_zero_centered_gamma heterogeneous_block_specs
            multi_latent_attention qk_clip log_max_attention_logit
            """,
            False,
        ),
    },
    "patched": {
        **_OFF,
        "cuda_graph_impl": ("none",),
        **_each(
            """
            fp16 fine_grained_activation_offloading overlap_moe_expert_parallel_comm tp_comm_overlap
            enable_cuda_graph external_cuda_graph
            """,
            False,
        ),
    },
}
"""Values that are not refused. None, False, 0 and "" count as one value."""

_WITHOUT_MEANING = """
    async_tensor_model_parallel_allreduce fp8_recipe fp8_param fp8_quantizer_factory fp8_margin
    fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention
    fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
    num_layers_at_end_in_bf16 fp4_recipe fp4_param fp4_quantizer_factory kitchen_attention_backend
    cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering persist_layer_norm
    memory_efficient_layer_norm dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads moe_use_legacy_grouped_gemm
    use_fused_weighted_squared_relu tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
    tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    tp_comm_bootstrap_backend disable_parameter_transpose_cache symmetric_ar_type mamba_state_dim
    mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
"""
WITHOUT_MEANING: dict[str, frozenset[str]] = {
    "built": frozenset(
        f"""
        {_WITHOUT_MEANING} hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
        cp_comm_type window_attn_skip_freq qk_clip_alpha qk_clip_threshold attention_backend
        attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion
        tp_comm_overlap
        """.split()
    ),
    "patched": frozenset(
        f"""
        {_WITHOUT_MEANING} moe_extended_tp moe_token_dropping
        apply_residual_connection_post_layernorm use_inference_optimized_layers quant_recipe
        offload_modules min_offloaded_tensor_size activation_func_fp8_input_store apply_rope_fusion
        fused_single_qkv_rope ep_overlap_early_attn_memory_release wgrad_deferral_limit
        cross_entropy_loss_fusion cross_entropy_fusion_impl cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_scope
        """.split()
    ),
}
"""Fields that change nothing: parts of what is refused, choices among kernels of other packages,
for other models.
"""

_HONOURED = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_comm_backend sequence_parallel expert_model_parallel_size
    expert_tensor_parallel_size num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split timers finalize_model_grads_func grad_scale_func no_sync_func
    grad_sync_func param_sync_func enable_autocast autocast_dtype
    num_microbatches_with_partial_activation_checkpoints pipeline_dtype variable_seq_lengths
    overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
    overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
    barrier_with_L1_time use_te_rng_tracker inference_rng_tracker inference_sampling_seed
    init_model_with_meta_device hetereogenous_dist_checkpoint calculate_per_token_loss params_dtype
    bf16 perform_initialization use_cpu_initialization init_method output_layer_init_method
    init_method_std embedding_init_method embedding_init_method_std is_hybrid_model
    deterministic_mode disable_bf16_reduced_precision_matmul num_layers hidden_size
    num_attention_heads num_query_groups ffn_hidden_size kv_channels hidden_dropout
    layernorm_epsilon add_bias_linear add_qkv_bias gated_linear_unit bias_dropout_fusion
    clone_scatter_output_in_embedding activation_func bias_activation_fusion glu_linear_offset
    activation_func_clamp_value mlp_chunks_for_prefill attention_dropout softmax_scale qk_layernorm
    qk_l2_norm attention_output_gate rotary_interleaved no_rope_freq mrope_section test_mode
    num_moe_experts moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq
    moe_ffn_hidden_size moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay
    moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
    moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing
    moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type
    moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute moe_permute_fusion
    moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms
    moe_hybridep_num_sms moe_shared_expert_overlap moe_grouped_gemm recompute_granularity
    recompute_method recompute_num_layers distribute_saved_activations recompute_modules
    gradient_accumulation_fusion defer_embedding_wgrad_compute mtp_num_layers
    mtp_loss_scaling_factor config_logger_dir flash_decode
"""
KNOWN = frozenset(_HONOURED.split()).union(*WITHOUT_MEANING.values(), *ACCEPTED.values())
