"""Attention of patched layers: Megatron's rotary embedding in one pass, and q, k, v and the
output kept in FP8.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model
from megatron_patches.compat import older_than, set_rope_mscale
from megatron_patches.layers import attention as module

from .tiny import (
    BATCH,
    BLOCKS,
    FP32,
    FULL,
    HEADS,
    HIDDEN,
    SEQ,
    assert_equal,
    gradients,
    selective,
    tiny_batch,
    tiny_gpt,
)

SETTINGS, FP8 = ActivationConfig(), ActivationConfig(attention="fp8")


ROTARY = {
    "llama": {},
    "gqa_bias_layernorm": {
        "num_query_groups": 2,
        "add_qkv_bias": True,
        "normalization": "LayerNorm",
    },
    "partial": {"gpt": {"rotary_percent": 0.5}},
    "interleaved": {"rotary_interleaved": True},
    "both": {"rotary_interleaved": True, "gpt": {"rotary_percent": 0.5}},
    "scaled": {},
    "no_rope_in_one_layer": {"no_rope_freq": [0, 1]},
    "learned_positions": {"gpt": {"position_embedding_type": "learned_absolute"}},
    "megatron_spec": {"megatron_spec": True},
    "qk_norm": {"qk_layernorm": True, "num_query_groups": 2},
    "recompute": selective("core_attn"),
    "full_recompute": FULL,
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_embedding_in_one_pass_is_megatrons(name, monkeypatch, device):
    """fp32: the same losses and gradients to the bit, with the one pass and without."""
    options = FP32 | ROTARY[name]
    spec = options.get("megatron_spec", False)
    model, batch = tiny_gpt(**options), tiny_batch(1, device)
    if name == "scaled" and not older_than("0.15"):
        set_rope_mscale(model.config, 1.3)
    report = patch_model(model, SETTINGS)
    assert bool(report.unfused) == (name == "qk_norm") and report.patched == BLOCKS
    calls = []
    rotate = module.flow.norm_qkv
    monkeypatch.setattr(
        module.flow, "norm_qkv", lambda *a, **k: (calls.append(a[5]), rotate(*a, **k))[1]
    )
    found = gradients(model, batch, spec)
    assert len(calls) == (4 if name == "full_recompute" else 2)
    assert (calls[0] is None) == (name in ("learned_positions", "qk_norm"))
    assert (calls[1] is None) == (name in ("learned_positions", "qk_norm", "no_rope_in_one_layer"))
    if name != "full_recompute":
        assert calls[1] is None or calls[0] is calls[1], "one table serves all layers"
    count = len(calls)
    for layer in model.decoder.layers:
        own = layer.self_attention.coat
        layer.self_attention.coat = replace(own, kind=own.kind._replace(why_split="a test"))
    assert_equal(found, gradients(model, batch, spec))
    assert len(calls) == count


def attend(settings):
    model = tiny_gpt()
    patch_model(model, settings)
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16).to(next(model.parameters()).device)
    freqs = torch.randn(SEQ, 1, 1, HIDDEN // HEADS).to(x.device)
    return (
        model.decoder.layers[0].self_attention,
        x,
        {"attention_mask": None, "rotary_pos_emb": freqs},
    )


def test_attention_with_two_tables_is_megatrons(monkeypatch):
    """Different angles for queries and keys. Inference is handled by the same code."""
    attention, x, arguments = attend(SETTINGS)
    freqs = arguments["rotary_pos_emb"]
    together = attention(x, **arguments)[0]
    assert torch.equal(attention(x, **arguments | {"rotary_pos_emb": (freqs, freqs)})[0], together)
    monkeypatch.setattr(module.flow, "norm_qkv", None)
    apart = attention(x, **arguments | {"rotary_pos_emb": (freqs, freqs.clone())})[0]
    torch.testing.assert_close(apart, together, rtol=0.1, atol=0.1)
    assert not torch.equal(apart, together)


@pytest.mark.parametrize("documents", [False, True])
def test_attention_sees_angles_changed_in_place(documents):
    attention, x, arguments = attend(SETTINGS)
    freqs = arguments["rotary_pos_emb"]
    if documents:
        starts = torch.tensor([0, 5, SEQ], dtype=torch.int32)
        sizes = {"max_seqlen_q": SEQ, "max_seqlen_kv": SEQ}
        given = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, **sizes
        )
        arguments |= {"packed_seq_params": given}
        x = x[:, :1].contiguous()
    before = attention(x, **arguments)[0]
    freqs.mul_(0.5)
    after = attention(x, **arguments)[0]
    assert not torch.equal(after, before)
    assert torch.equal(after, attention(x, **arguments | {"rotary_pos_emb": freqs.clone()})[0])


def test_fp8_attention_refuses_arguments_of_megatrons_forward():
    attention, x, arguments = attend(FP8)
    freqs = arguments["rotary_pos_emb"]
    for name, given in (
        ("packed_seq_params", object()),
        ("inference_context", object()),
        ("rotary_pos_emb", (freqs, freqs.clone())),
        ("attention_mask", torch.ones(1, 1, SEQ, SEQ)),
    ):
        with pytest.raises(ValueError, match=f"{name}: got .*, accepted: None"):
            attention(x, **arguments | {name: given})
