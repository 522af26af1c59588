"""Every field of TransformerConfig, set to something else.

Honoured: what Megatron's own local spec computes. Refused: an error that names it. Without meaning: no bit changes.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_utils import RandomSTE
from packaging.version import Version

from coat_dist.config import ActivationConfig
from megatron_patches import fields, gpt_layer_spec, patch_model, patched
from megatron_patches.attention import SDPA
from megatron_patches.fields import FIELDS, Handled, Only

from .tiny import tiny_config

DECLARED = {f.name: f for f in dataclasses.fields(TransformerConfig)}
NEWEST = Version(metadata.version("megatron-core")) >= Version("0.16rc0")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 3e-6 if DEVICE == "cpu" else 1e-4  # fp32; a GPU may round products
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
FULL: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE: dict[str, Any] = dict(
    recompute_granularity="selective", recompute_modules=["core_attn"], moe_layer_recompute=True
)
KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")  # a model that is built sets these
WINDOW: dict[str, Any] = dict(window_size=(3, 0))

# Fields that change what a model computes: what is set, for GPTModel under "gpt". Alone where there is one key.
EFFECT: dict[str, dict[str, Any]] = {
    "num_layers": dict(num_layers=3),
    "hidden_size": dict(hidden_size=128),
    "num_attention_heads": dict(num_attention_heads=2),
    "num_query_groups": dict(num_query_groups=2),
    "ffn_hidden_size": dict(ffn_hidden_size=128),
    "kv_channels": dict(kv_channels=32),
    "hidden_dropout": dict(hidden_dropout=0.3),
    "attention_dropout": dict(attention_dropout=0.3),
    "layernorm_epsilon": dict(layernorm_epsilon=0.5),
    "normalization": dict(normalization="LayerNorm"),
    "params_dtype": dict(bf16=True, params_dtype=torch.bfloat16),
    "bf16": dict(bf16=True, params_dtype=torch.bfloat16),
    "init_method": dict(init_method=lambda w: torch.nn.init.uniform_(w, -0.2, 0.2)),
    "output_layer_init_method": dict(output_layer_init_method=lambda w: torch.nn.init.uniform_(w, -0.2, 0.2)),
    "init_method_std": dict(init_method_std=0.1),
    "embedding_init_method": dict(embedding_init_method=lambda w: torch.nn.init.uniform_(w, -0.2, 0.2)),
    "embedding_init_method_std": dict(embedding_init_method_std=1.0),
    "is_hybrid_model": dict(is_hybrid_model=True),
    "add_bias_linear": dict(add_bias_linear=True),
    "add_qkv_bias": dict(add_qkv_bias=True),
    "gated_linear_unit": dict(gated_linear_unit=False, activation_func=F.gelu),
    "activation_func": dict(activation_func=quick_gelu),
    "bias_activation_fusion": dict(bias_activation_fusion=True, activation_func=F.gelu),
    "glu_linear_offset": dict(glu_linear_offset=1.0),
    "activation_func_clamp_value": dict(activation_func_clamp_value=0.5, activation_func=quick_gelu),
    "softmax_scale": dict(softmax_scale=0.7),
    "qk_layernorm": dict(qk_layernorm=True),
    "qk_l2_norm": dict(qk_l2_norm=True),
    "attention_output_gate": dict(attention_output_gate=True),
    "test_mode": dict(test_mode=True, qk_layernorm=True, normalization="LayerNorm"),
    "rotary_interleaved": dict(rotary_interleaved=True),
    "no_rope_freq": dict(no_rope_freq=[0, 1]),
    "mrope_section": dict(mrope_section=[2, 3, 3], gpt=dict(position_embedding_type="mrope")),
    "num_moe_experts": EXPERTS,
    "moe_ffn_hidden_size": EXPERTS,
    "moe_layer_freq": dict(moe_layer_freq=[0, 1]) | EXPERTS,
    "moe_shared_expert_intermediate_size": dict(moe_shared_expert_intermediate_size=32) | EXPERTS,
    "moe_shared_expert_gate": dict(moe_shared_expert_gate=True, moe_shared_expert_intermediate_size=32) | EXPERTS,
    "moe_router_topk": dict(moe_router_topk=3) | EXPERTS,
    "moe_router_load_balancing_type": dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1) | EXPERTS,
    "moe_router_group_topk": dict(moe_router_num_groups=2, moe_router_group_topk=1) | EXPERTS,
    "moe_router_num_groups": dict(moe_router_num_groups=2, moe_router_group_topk=1) | EXPERTS,
    "moe_router_pre_softmax": dict(moe_router_pre_softmax=True) | EXPERTS,
    "moe_router_topk_scaling_factor": dict(moe_router_topk_scaling_factor=2.0, moe_router_pre_softmax=True) | EXPERTS,
    "moe_router_score_function": dict(moe_router_score_function="sigmoid") | EXPERTS,
    "moe_router_enable_expert_bias": dict(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    | EXPERTS,
    "moe_input_jitter_eps": dict(moe_input_jitter_eps=0.1) | EXPERTS,
    "moe_router_force_load_balancing": dict(moe_router_force_load_balancing=True) | EXPERTS,
    "moe_apply_probs_on_input": dict(moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True)
    | EXPERTS,
}
# Fields of core attention that SDPA does not have, so that our spec refuses them: patched in a model of Megatron's spec.
CORE: dict[str, dict[str, Any]] = {
    "window_size": WINDOW,
    "window_attn_skip_freq": dict(window_attn_skip_freq=2) | WINDOW,
    "softmax_type": dict(softmax_type="off-by-one"),
}
# Fields that change nothing in the forward pass of one rank, set all at once. Booleans are turned around.
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
    **{key: (lambda *args, **kwargs: None) for key in ("grad_scale_func", "finalize_model_grads_func")},
    **{key: (lambda *args, **kwargs: None) for key in ("no_sync_func", "grad_sync_func", "param_sync_func")},
    **EXPERTS,
) | {
    key: not DECLARED[key].default
    for key in """
        use_cpu_initialization deterministic_mode enable_autocast use_te_rng_tracker cross_entropy_loss_fusion
        overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
        barrier_with_L1_time mtp_standalone calculate_per_token_loss init_model_with_meta_device
        disable_bf16_reduced_precision_matmul distribute_saved_activations
        moe_enable_routing_replay moe_per_layer_logging cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph clone_scatter_output_in_embedding inference_rng_tracker
        hetereogenous_dist_checkpoint activation_func_fp8_input_store""".split()
    if key in DECLARED
}
# Honoured fields that one CPU rank cannot set, by what they need.
NEEDS = {
    "other ranks": """tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        sequence_parallel expert_model_parallel_size expert_tensor_parallel_size num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split overlap_p2p_comm_warmup_flush context_parallel_size hybrid_context_parallel
        hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank cp_comm_type overlap_moe_expert_parallel_comm
        ep_overlap_early_attn_memory_release defer_embedding_wgrad_compute moe_router_topk_limited_devices""",
    "CUDA": """moe_token_dispatcher_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_shared_expert_overlap moe_enable_deepep cuda_graph_impl enable_cuda_graph external_cuda_graph
        variable_seq_lengths""",
    "another package": """gradient_accumulation_fusion apply_rope_fusion fused_single_qkv_rope moe_latent_size
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_permute_fusion moe_router_fusion
        fine_grained_activation_offloading""",
    "the class of the model": "mtp_num_layers",  # given a specification of its own
    "a training loop": "timers qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
    "weights": "perform_initialization",
    "inference": "flash_decode",
    "compilation": "bias_dropout_fusion",
    "FP16, which is not patched": "fp16",
}


def build(changes: dict[str, Any], megatron_spec: bool = False, later: dict[str, Any] | None = None) -> GPTModel:
    """``later``: what is set past the checks of Megatron's configuration, which refuses some together."""
    options = dict(vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope") | changes.get("gpt", {})
    config = tiny_config(**SIZES | {k: v for k, v in changes.items() if k != "gpt"})
    for name, value in (later or {}).items():
        setattr(config, name, value)
    if megatron_spec:
        l2 = {"qk_l2_norm": getattr(config, "qk_l2_norm", False), "normalization": config.normalization}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **l2)
    else:
        spec = gpt_layer_spec(config)
    torch.manual_seed(5)
    model = GPTModel(config, spec, **options).to(config.params_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero as they are built
                parameter.normal_()
    return model.to(DEVICE)


@torch.no_grad()
def logits(model: GPTModel) -> torch.Tensor:
    """Of a training model: dropout and noise are drawn from the same state each time."""
    model_parallel_cuda_manual_seed(3)
    torch.manual_seed(11)
    RandomSTE.generator = None  # of moe_router_force_load_balancing; it would go on where another model stopped
    tokens, positions = torch.randint(0, VOCAB, (2, SEQ)).to(DEVICE), torch.arange(SEQ, device=DEVICE).expand(2, -1)
    if model.position_embedding_type == "mrope":
        positions = torch.stack([positions, positions // 2, positions // 3])
    core = model.decoder.layers[0].self_attention.core_attention
    mask = None if isinstance(core, SDPA) else torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=DEVICE).triu(1)
    return model(tokens, positions, mask).float()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def settable(name: str, accepted: tuple[Any, ...] = ()) -> Any:
    """Something that the field is not by default, and none of ``accepted``."""
    usual = (DECLARED[name].default, *accepted)
    return next(
        value for value in (True, False, "other", 7) if value not in usual and str(value) not in map(str, usual)
    )


def test_the_table_has_every_field_and_every_field_is_tried():
    """A new Megatron's new field fails here: look at what it does, and put it into the table."""
    assert set(DECLARED) <= set(FIELDS)
    if NEWEST:
        assert set(DECLARED) == set(FIELDS)
    tried = [*EFFECT, *CORE, *INERT, *FULL, *SELECTIVE, *(name for names in NEEDS.values() for name in names.split())]
    honoured = {
        name for name, field in FIELDS.items() if Handled.HONOURED in field and not isinstance(field.built, str)
    }
    assert not (honoured & set(DECLARED)) - set(tried)
    assert not set(tried) - set(FIELDS)


def known(table: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, changes in table.items() if set(changes) <= {*DECLARED, "gpt"}]


@pytest.mark.parametrize("name", known(EFFECT))
def test_a_field_does_what_it_does_in_megatrons_own_spec(name):
    """fp32: our spec computes what Megatron's local spec does. Patched, the model changes with it."""
    changes = EFFECT[name]
    base = EXPERTS if name.startswith("moe_") and changes is not EXPERTS else {}
    plain, theirs, usual = logits(build(changes)), logits(build(changes, megatron_spec=True)), logits(build(base))
    assert apart(plain, theirs) < (2e-2 if changes.get("bf16") else CLOSE)
    assert apart(plain, usual) > 5e-3, "no effect: nothing was tested"
    model = build(changes)
    patch_model(model, ActivationConfig())
    usual_model = build(base)
    patch_model(usual_model, ActivationConfig())
    flow = logits(model)
    assert apart(flow, plain) < 0.35  # FP8 with these weights: 0.04 to 0.25
    assert apart(flow, logits(usual_model)) > 5e-3


@pytest.mark.parametrize("name", known(CORE))
def test_core_attention_of_a_patched_model_stays_what_it_was(name, monkeypatch):
    if name.startswith("window") and DEVICE == "cpu":  # Megatron makes the mask on a GPU
        from megatron.core.fusions import fused_softmax

        if not hasattr(fused_softmax, "get_sliding_window_causal_mask"):
            pytest.skip("this megatron-core's own attention has no window")

        def mask(queries, keys, window):
            rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
            return (columns > rows) | (columns < rows - window[0])

        monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", mask)
    plain, usual = logits(build(CORE[name], megatron_spec=True)), logits(build({}, megatron_spec=True))
    assert apart(plain, usual) > 0.05, "no effect: nothing was tested"
    model, other = build(CORE[name], megatron_spec=True), build({}, megatron_spec=True)
    for m in (model, other):
        assert len(patch_model(m, ActivationConfig()).patched) == 4
    assert apart(logits(model), plain) < 0.2
    assert apart(logits(model), logits(other)) > 0.05
    with pytest.raises(ValueError, match="window_size|softmax_type"):
        build(CORE[name])


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_fields_that_change_nothing_on_one_rank(recompute):
    """All at once, with experts: what Megatron's local spec computes, and what it is without them."""
    inert = {k: v for k, v in INERT.items() if k in DECLARED}
    inert |= FULL if recompute == "full" else SELECTIVE
    plain = logits(build(inert))
    assert torch.equal(plain, logits(build(EXPERTS)))
    assert apart(plain, logits(build(inert, megatron_spec=True))) < CLOSE
    with patched(model := build(inert), ActivationConfig()), patched(usual := build(EXPERTS), ActivationConfig()):
        assert torch.equal(logits(model), logits(usual))


@pytest.mark.parametrize("where", ["built", "patched"])
def test_fields_without_meaning_change_no_bit(where, monkeypatch):
    """All at once, in a built and in a patched model."""
    names = {n for n, f in FIELDS.items() if isinstance(getattr(f, where), str) and n in DECLARED}
    names -= {"_cpu_offloading_context"}  # an object that Megatron makes itself
    values = {n: AttnBackend.unfused if n == "attention_backend" else settable(n) for n in names}
    usual = build({})
    for key in KERNELS:
        monkeypatch.delenv(key, raising=False)
    model = build({}, later=values if where == "built" else None)
    if where == "patched":
        for name, value in values.items():
            setattr(model.config, name, value)
        for m in (model, usual):
            patch_model(m, ActivationConfig())
    assert torch.equal(logits(model), logits(usual))
    for key in KERNELS:
        monkeypatch.delenv(key, raising=False)


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if isinstance(f.built, Only) and n in DECLARED])
def test_the_spec_refuses_by_name(name):
    config = tiny_config(**EXPERTS)
    setattr(config, name, settable(name, FIELDS[name].built.accepted))
    with pytest.raises(ValueError, match=rf"^{name}: got .*, accepted: .* \(use Megatron's own spec\)$"):
        gpt_layer_spec(config)


def test_patching_refuses_by_name():
    """Nothing is patched, and the reason names the field."""
    model = build({})
    names = [n for n, f in FIELDS.items() if isinstance(f.patched, Only) and n in DECLARED]
    assert len(names) > 5
    for name in names:
        before = getattr(model.config, name)
        setattr(model.config, name, value := settable(name, FIELDS[name].patched.accepted))
        with pytest.raises(ValueError, match="nothing to patch") as error:
            patch_model(model, ActivationConfig())
        assert f"config.{name}={value}" in str(error.value)
        setattr(model.config, name, before)
    patch_model(model, ActivationConfig())


@pytest.mark.parametrize("name", ["softmax_scale", "rotary_interleaved", "num_query_groups", "recompute_modules"])
def test_a_field_that_is_not_in_the_table_is_refused_where_it_is_set(name, monkeypatch):
    """As with a newer Megatron. At its default it is let pass, also where Megatron derives that from other fields."""
    monkeypatch.delitem(fields.FIELDS, name)
    build({})
    config = tiny_config()
    value = 2 if name == "num_query_groups" else ["mlp"] if name == "recompute_modules" else 0.5
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"^{name}: got .*, accepted: .* not known here"):
        gpt_layer_spec(config)
    model = build({})
    setattr(model.config, name, value)
    with pytest.raises(ValueError, match="nothing to patch") as error:
        patch_model(model, ActivationConfig())
    assert f"config.{name}={value} is not known here" in str(error.value)


def test_settings_of_experts_mean_nothing_in_a_dense_model():
    gpt_layer_spec(tiny_config(moe_grouped_gemm=True))
    with pytest.raises(ValueError, match="moe_grouped_gemm: got True, accepted: False"):
        gpt_layer_spec(tiny_config(moe_grouped_gemm=True, **EXPERTS))
