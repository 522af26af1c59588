"""Models of a description against transformers' own: the same logits, loss and gradients in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coat_dist.config import ActivationConfig
from launch.model.gpt import build_model, load_model_config, parameter_count
from megatron_patches import patch_model

transformers = pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny.json"
HIDDEN, FFN, HEADS, GROUPS, LAYERS, VOCAB, SEQ = 64, 96, 4, 2, 2, 128, 24
SIZES = dict(
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    num_hidden_layers=LAYERS,
    vocab_size=VOCAB,
    max_position_embeddings=SEQ,
)
OVERRIDES = [f"hidden_size={HIDDEN}", f"ffn_hidden_size={FFN}", f"num_attention_heads={HEADS}", f"seq_length={SEQ}",
             f"num_query_groups={GROUPS}", f"num_layers={LAYERS}", f"vocab_size={VOCAB}"]  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)  # fmt: skip
CASES = {
    "olmo2": (
        lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(
            **SIZES, pad_token_id=None, eos_token_id=None, rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=500000.0))),
        ["norm_placement=post", "qk_norm=full", "norm_eps=1e-6", "rotary_base=500000"],
    ),
    "qwen3": (
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
            **SIZES, head_dim=32, rms_norm_eps=1e-3, rope_parameters=dict(YARN, rope_theta=10000.0))),
        ["qk_norm=true", "head_size=32", "norm_eps=1e-3",
         'rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}'],
    ),
    "llama_biases": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
            **SIZES, attention_bias=True, rms_norm_eps=1e-5, rope_parameters=dict(LLAMA3, rope_theta=10000.0))),
        ["qkv_bias=true", "attention_output_bias=true",
         'rope_scaling={"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, '
         '"original_max_position_embeddings": 16}'],
    ),
    "mistral_window": (
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(
            **SIZES, sliding_window=SEQ, rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=1e4))),
        [f"sliding_window={SEQ}"],
    ),
}  # fmt: skip


def mapped(theirs: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """A Hugging Face model's tensors (or their gradients) under Megatron's names, in Megatron's layout."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for i in range(LAYERS):
        to, of = f"decoder.layers.{i}.", f"model.layers.{i}."
        for end in ("weight", "bias"):
            if f"{of}self_attn.q_proj.{end}" in theirs:
                q, k, v = (theirs[f"{of}self_attn.{n}_proj.{end}"] for n in "qkv")
                parts = [t.view(GROUPS, -1, size, *t.shape[1:]) for t in (q, k, v)]
                ours[f"{to}self_attention.linear_qkv.{end}"] = torch.cat(parts, 1).flatten(0, 2)
        for key, name in {
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "input_layernorm.weight": "input_layernorm.weight",
            "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
        }.items():
            if of + name in theirs:
                ours[to + key] = theirs[of + name]
        after = "post_self_attn_layernorm" if f"{to}post_mlp_layernorm.weight" in ours else "pre_mlp_layernorm"
        ours[f"{to}{after}.weight"] = theirs[f"{of}post_attention_layernorm.weight"]
        ours[f"{to}mlp.linear_fc1.weight"] = torch.cat(
            [theirs[f"{of}mlp.gate_proj.weight"], theirs[f"{of}mlp.up_proj.weight"]]
        )
    return ours


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(one_rank, name):
    make, overrides = CASES[name]
    torch.manual_seed(3)
    theirs = make().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:  # norms start as ones, biases as zeros: a mix-up would go unseen
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    model = load_model_config(TINY, [*OVERRIDES, *overrides])
    built = build_model(model, dtype=torch.float32)
    device = next(built.parameters()).device
    theirs = theirs.to(device)
    state = mapped(dict(theirs.named_parameters()), model.head_channels)
    own = dict(built.named_parameters())
    assert set(state) == set(own)
    assert sum(p.numel() for p in own.values()) == parameter_count(model) == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(state[key])

    tokens, positions = torch.randint(0, VOCAB, (2, SEQ), device=device), torch.arange(SEQ, device=device).expand(2, -1)
    expected = theirs(tokens).logits
    logits = built(tokens, positions, None)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))
    for out in (logits, expected):
        F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads = mapped({n: p.grad for n, p in theirs.named_parameters()}, model.head_channels)
    for key, parameter in own.items():
        scale = float(grads[key].abs().max())
        torch.testing.assert_close(
            parameter.grad, grads[key], rtol=1e-4, atol=2e-5 * scale, msg=lambda text, key=key: f"{key}: {text}"
        )

    patch_model(built, ActivationConfig())
    close = F.cosine_similarity(built(tokens, positions, None).flatten(), expected.flatten(), dim=0)
    assert 0.97 < close < 1 - 1e-7
