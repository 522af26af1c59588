"""Attention of patched layers: Megatron's rotary embedding in one pass, and q, k, v and the output kept in FP8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from coat_dist.config import ActivationConfig
from coat_dist.reference.rope import Heads, rope_table, split_rope, split_rope_backward
from megatron_patches import patch_model, patched
from megatron_patches.layers import attention as module

from .saved_bytes import layer_bytes
from .tiny import BATCH, BLOCKS, FFN, HEADS, HIDDEN, SEQ, gradients, tiny_batch, tiny_config, tiny_gpt, tiny_loss

SETTINGS, FP8 = ActivationConfig(), ActivationConfig(attention="fp8")


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mscale", [1.0, 1.3])
def test_definition_is_megatrons_function_to_the_bit_in_fp32(percent, interleaved, mscale):
    heads = Heads(groups=2, per_group=3, size=32)
    config = tiny_config(rotary_interleaved=interleaved)
    freqs = RotaryEmbedding(32, percent, rotary_interleaved=interleaved, use_cpu_initialization=True)(SEQ)
    mixed = torch.randn(SEQ, BATCH, heads.width, requires_grad=True)

    def megatron(mixed):
        q, k, v = mixed.view(SEQ, BATCH, 2, 5 * 32).split([3 * 32, 32, 32], dim=3)
        q = q.reshape(SEQ, BATCH, -1, 32)
        return *(rope_utils.apply_rotary_pos_emb(t, freqs, config=config, mscale=mscale) for t in (q, k)), v

    table = rope_table(freqs, interleaved, mscale)
    theirs, ours = megatron(mixed), split_rope(mixed, heads, table)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    douts = [torch.randn_like(t) for t in ours]
    (wanted,) = torch.autograd.grad(theirs, mixed, douts)
    assert torch.equal(split_rope_backward(*douts, heads, table)[0], wanted)

    # In BF16 ours is that, rounded once; Megatron's own also rounds cosines, products and the sum: 2**-7 of a pair.
    low = mixed.detach().bfloat16()
    for got, exact, rough in zip(split_rope(low, heads, table), megatron(low.float()), megatron(low), strict=True):
        assert torch.equal(got, exact.bfloat16())
        pair = exact.abs().amax(-1, keepdim=True) * 2**0.5 * mscale
        assert ((rough.float() - exact).abs() <= 2.0**-6 * pair).all()
        assert (got.float() - exact).norm() <= (rough.float() - exact).norm()


ROTARY = {
    "llama": {},
    "gqa_bias_layernorm": {"num_query_groups": 2, "add_qkv_bias": True, "normalization": "LayerNorm"},
    "partial": {"gpt": {"rotary_percent": 0.5}},
    "interleaved": {"rotary_interleaved": True},
    "no_rope_in_one_layer": {"no_rope_freq": [0, 1]},
    "learned_positions": {"gpt": {"position_embedding_type": "learned_absolute"}},
    "megatron_spec": {"megatron_spec": True},
    "qk_norm": {"qk_layernorm": True, "num_query_groups": 2},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full_recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("name", ROTARY)
def test_one_pass_computes_what_megatrons_passes_do(name, monkeypatch, device):
    """fp32: the same losses and gradients to the bit, with the one pass and without."""
    options = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32} | ROTARY[name]
    spec = options.get("megatron_spec", False)
    model, batch = tiny_gpt(**options), tiny_batch(1, device)
    report = patch_model(model, SETTINGS)
    assert bool(report.unfused) == (name == "qk_norm") and report.patched == BLOCKS
    calls = []
    rotate = module.flow.norm_qkv
    monkeypatch.setattr(module.flow, "norm_qkv", lambda *a, **k: (calls.append(a[5]), rotate(*a, **k))[1])
    loss, grads = gradients(model, batch, spec)
    assert len(calls) == (4 if name == "full_recompute" else 2)
    assert (calls[0] is None) == (name in ("learned_positions", "qk_norm"))
    assert (calls[1] is None) == (name in ("learned_positions", "qk_norm", "no_rope_in_one_layer"))
    if name != "full_recompute":
        assert calls[1] is None or calls[0] is calls[1], "one table serves all layers"
    monkeypatch.setattr(module, "why_megatron_splits_qkv", lambda attention: "a test")
    loss_apart, grads_apart = gradients(model, batch, spec)
    assert loss == loss_apart and len(calls) == (4 if name == "full_recompute" else 2)
    if device == "cpu":  # a GPU's attention backward is not deterministic
        assert all(torch.equal(grads_apart[n], g) for n, g in grads.items())


def attend(model, **changes):
    attention = model.decoder.layers[0].self_attention
    x = torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16).to(next(model.parameters()).device)
    freqs = torch.randn(SEQ, 1, 1, HIDDEN // HEADS).to(x.device)
    return attention, x, {"attention_mask": None, "rotary_pos_emb": freqs} | changes


def test_other_calls_are_megatrons(monkeypatch):
    """Different angles for queries and keys. Inference is handled by the same code."""
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    attention, x, arguments = attend(model)
    freqs = arguments["rotary_pos_emb"]
    together = attention(x, **arguments)[0]
    assert torch.equal(attention(x, **arguments | {"rotary_pos_emb": (freqs, freqs)})[0], together)
    monkeypatch.setattr(module.flow, "norm_qkv", None)
    apart = attention(x, **arguments | {"rotary_pos_emb": (freqs, freqs.clone())})[0]
    torch.testing.assert_close(apart, together, rtol=0.1, atol=0.1)
    assert not torch.equal(apart, together)


def test_fp8_refuses_arguments_that_only_megatrons_forward_takes():
    model = tiny_gpt()
    patch_model(model, FP8)
    attention, x, arguments = attend(model)
    freqs = arguments["rotary_pos_emb"]
    for name, given in (("packed_seq_params", object()), ("inference_context", object())):
        with pytest.raises(ValueError, match=f'{name}: got object, accepted: None .* activation.attention "fp8"'):
            attention(x, **arguments | {name: given})
    with pytest.raises(ValueError, match="rotary_pos_emb: got tuple"):
        attention(x, **arguments | {"rotary_pos_emb": (freqs, freqs.clone())})
    with pytest.raises(ValueError, match="attention_mask: got a tensor"):
        attention(x, **arguments | {"attention_mask": torch.ones(1, 1, SEQ, SEQ)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention kernels of the GPU keep their own statistics")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_fp8_saves_the_planned_bytes(groups, qk_layernorm):
    tokens, h, head = BATCH * SEQ, HIDDEN, HIDDEN // HEADS
    kept = 2 * h + 2 * groups * head  # q, o; k, v
    inputs = 2 * (h + h // 32 + 4)
    expected = tokens * (inputs + kept + kept // 32 + 4 * HEADS + 2 * FFN + 2 * FFN // 32) + 4 * 8
    if qk_layernorm:  # the inputs of both norms and their statistics; Megatron's cosines and sines, for q and for k
        expected += tokens * (2 * (h + groups * head) + 4 * (HEADS + groups)) + 2 * 2 * 2 * SEQ * head
    assert layer_bytes(FP8, num_query_groups=groups, qk_layernorm=qk_layernorm) == expected


@pytest.mark.parametrize("name", ["llama", "gqa_bias_layernorm", "interleaved", "qk_norm"])
def test_fp8_close_to_bf16_and_undone(name, device):
    model, batch = tiny_gpt(**ROTARY[name]), tiny_batch(1, device)
    classes = [type(m) for m in model.modules()]
    loss, grads = gradients(model, batch)
    with patched(model, FP8) as report:
        assert report.patched == BLOCKS
        fp8_loss, fp8_grads = gradients(model, batch)
        model.eval()
        with torch.no_grad():
            evaluated = tiny_loss(model, batch).item()
        model.train()
        if device == "cpu":
            assert evaluated == fp8_loss
    with patched(model, SETTINGS):
        assert fp8_loss != gradients(model, batch)[0] != loss
    assert fp8_loss == pytest.approx(loss, rel=5e-3)
    for n, g in grads.items():
        assert F.cosine_similarity(g.flatten().double(), fp8_grads[n].flatten().double(), dim=0) > 0.96, n
    assert [type(m) for m in model.modules()] == classes
    assert gradients(model, batch)[0] == loss


def test_fp8_under_full_recompute_is_the_same(device):
    batch, results = tiny_batch(2, device), []
    for options in ({}, ROTARY["full_recompute"]):
        model = tiny_gpt(**options)
        patch_model(model, FP8)
        results.append(gradients(model, batch))
    (loss, grads), (other_loss, other) = results
    assert loss == other_loss
    if device == "cpu":
        assert all(torch.equal(other[n], g) for n, g in grads.items())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"megatron_spec": True}, "core attention class DotProductAttention"),
        (ROTARY["recompute"], "recompute_modules 'core_attn'"),
        ({"test_mode": True}, "config.test_mode=True"),
    ],
)
def test_fp8_refuses_attention_that_cannot(options, reason):
    model = tiny_gpt(**options)
    with pytest.raises(ValueError, match='activation.attention: got "fp8", accepted: "bf16" with') as error:
        patch_model(model, FP8)
    assert reason in str(error.value) and "(layer 1)" in str(error.value)
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())
