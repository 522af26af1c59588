"""Every kind of layer that can be patched, as a small GPT: what is patched, how close it is, and
undoing it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.identity_op import IdentityOp

from coat_dist.config import ActivationConfig
from megatron_patches import patched
from megatron_patches.layers.core_attention import SDPA

from .tiny import (
    BLOCKS,
    OLMO2,
    SEQ,
    TINY,
    VOCAB,
    assert_close,
    assert_equal,
    gradients,
    state,
    tiny_batch,
    tiny_gpt,
    tiny_loss,
)

UNGATED = {"gated_linear_unit": False}
TIED = {"share_embeddings_and_output_weights": True}
EXPERTS = {"num_moe_experts": 3, "moe_router_topk": 3}
"""Every token goes to every expert: FP8 cannot change the routing, so gradients can be compared."""
GATE = (
    {"moe_shared_expert_gate": True} if hasattr(TransformerConfig, "moe_shared_expert_gate") else {}
)
TENSOR, FP8 = {"forward_scales": "tensor"}, {"attention": "fp8"}
COMMON = ("rmsnorm", "gpt2", "experts", "fp8 attention")  # what `make test-unit` runs

KINDS: dict[str, dict[str, Any]] = {
    # norms
    "rmsnorm": {},
    "megatron_spec_layernorm": {"megatron_spec": True, "normalization": "LayerNorm"},
    "layernorm_after": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "spec": {"norm_placement": "post"},
    },
    # attention
    "qk_layernorm_grouped_bias": {
        "qk_layernorm": True,
        "normalization": "LayerNorm",
        "num_query_groups": 2,
        "add_qkv_bias": True,
    },
    "attention_biases": {"add_qkv_bias": True, "spec": {"attention_output_bias": True}},
    # MLPs
    "quick_geglu": {"activation_func": quick_gelu},
    "biases": {"add_bias_linear": True},
    "gelu_biases": {"activation_func": F.gelu, "add_bias_linear": True} | UNGATED,
    "dropout_after_biases": {
        "hidden_dropout": 0.2,
        "attention_dropout": 0.1,
        "add_bias_linear": True,
    },
    # families
    "gpt2": {
        "normalization": "LayerNorm",
        "activation_func": F.gelu,
        "add_bias_linear": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "gpt": TIED | {"position_embedding_type": "learned_absolute"},
    }
    | UNGATED,
    "olmo": {"normalization": "LayerNorm", "affine": False, "gpt": TIED},
    "olmo2": OLMO2 | {"num_query_groups": 2},
    "qwen2": {"num_query_groups": 2, "add_qkv_bias": True},
    "qwen3": {"num_query_groups": 2, "qk_layernorm": True, "kv_channels": 96},
    "nemotron": {
        "normalization": "LayerNorm",
        "activation_func": squared_relu,
        "num_query_groups": 2,
    }
    | UNGATED,
    # experts
    "experts": EXPERTS,
    "experts_of_megatron_spec": EXPERTS | {"megatron_spec": True},
    "experts_in_some_layers": EXPERTS | {"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 128},
    "shared_experts": EXPERTS
    | GATE
    | {"moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 64},
    "gelu_experts": EXPERTS | {"activation_func": F.gelu} | UNGATED,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (kind, {}) for name, kind in KINDS.items()},
    **{
        f"{name} tensor": (KINDS[name], TENSOR)
        for name in ("rmsnorm", "gpt2", "olmo2", "qwen3", "biases")
    },
    **{
        f"{name} quantized": (KINDS[name], {"forward": "quantized"})
        for name in ("rmsnorm", "gpt2", "olmo2")
    },
    "fp8 attention": ({}, FP8),
    **{f"{name} fp8 attention": (KINDS[name], FP8) for name in ("qwen2", "qwen3", "olmo2")},
    "interleaved fp8 attention": ({"rotary_interleaved": True}, FP8),
    "no fp8_gather": (OLMO2, {"fp8_gather": False}),
    "tp_invariant": ({"qk_layernorm": True}, {"tp_invariant": True}),
}


def check(model, settings, device, megatron_spec=False):
    """Patched within the documented bounds of BF16; undone to the bit. Returns the report."""
    batch, before, keys = tiny_batch(1, device), state(model), list(model.state_dict())
    expected = gradients(model, batch, megatron_spec)
    with patched(model, ActivationConfig(**settings)) as report:
        assert list(model.state_dict()) == keys and state(model) != before
        found = gradients(model, batch, megatron_spec)
        assert found[0] != expected[0]
        assert_close(found, expected)
        assert found[0] == gradients(model, batch, megatron_spec)[0], "not deterministic"
    assert state(model) == before and list(model.state_dict()) == keys
    assert_equal(gradients(model, batch, megatron_spec), expected)
    return report


@pytest.mark.parametrize(
    "name", [n if n in COMMON else pytest.param(n, marks=pytest.mark.long) for n in CASES]
)
def test_patched_is_near_and_unpatch_model_restores(name, device):
    options, settings = CASES[name]
    model = tiny_gpt(**options)
    with torch.no_grad():  # biases of column-parallel linears are zeros as they are built
        for parameter in (p for n, p in model.named_parameters() if n.endswith("bias")):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    report = check(model, settings, device, options.get("megatron_spec", False))
    routers = [n for n in report.left if n.endswith(".mlp.router")]
    assert report.left == dict.fromkeys(routers, "routing is not quantized")
    assert sum(".experts" in n for n in report.patched) == len(routers)
    assert len([n for n in report.patched if "shared" not in n and n != "output_layer"]) == len(
        BLOCKS
    )


def latent_attention() -> torch.nn.Module:
    """A model with multi-latent attention, without Transformer Engine: SDPA in place of
    Megatron's core attention.
    """
    config = MLATransformerConfig(
        **TINY,
        multi_latent_attention=True,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_head_dim=32,
        qk_pos_emb_head_dim=16,
        v_head_dim=32,
        rope_type="rope",
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SDPA
    options: dict[str, Any] = dict(
        vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope"
    )
    return GPTModel(config, spec, **options).bfloat16()


def test_patch_model_leaves_multi_latent_attention(device, monkeypatch):
    # megatron-core 0.16 takes it for granted.
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    report = check(latent_attention().to(device), {}, device)
    assert report.patched == BLOCKS[1::2] and report.left == dict.fromkeys(
        BLOCKS[::2], "multi-latent attention"
    )


def test_patch_model_of_blocks_without_norms(device):
    """A layer of any specification, with Megatron's own addition behind its blocks."""
    model = tiny_gpt()
    model.decoder.layers[0].input_layernorm, model.decoder.layers[1].pre_mlp_layernorm = (
        IdentityOp(),
        IdentityOp(),
    )
    report = check(model, {}, device)
    additions = ["decoder.layers.0.self_attn_bda", "decoder.layers.1.mlp_bda"]
    assert report.patched == BLOCKS and report.unfused == dict.fromkeys(
        additions, "no norm before the block"
    )


def test_dropout_of_patched_layers_drops(device):
    """Cases above start from one random state. Two passes in a row drop different elements."""
    model, batch = tiny_gpt(**KINDS["dropout_after_biases"]), tiny_batch(1, device)
    with patched(model, ActivationConfig()):
        assert tiny_loss(model, batch).item() != tiny_loss(model, batch).item()
        model.eval()
        assert tiny_loss(model, batch).item() == tiny_loss(model, batch).item()
