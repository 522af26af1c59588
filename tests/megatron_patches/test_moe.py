"""Mixtures of experts and multi-latent attention: the parts that run the flow, the rest with its reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe.experts import SequentialMLP

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.compat import older_than
from megatron_patches.layers.core_attention import SDPA
from megatron_patches.layers.experts import ExpertMLP

from .tiny import HIDDEN, SEQ, TINY, VOCAB, gradients, tiny_batch, tiny_gpt

SETTINGS = ActivationConfig()
ATTENTION = [f"decoder.layers.{i}.self_attention" for i in range(2)]
ALL = {"num_moe_experts": 3, "moe_router_topk": 3}
"""Every token goes to every expert: FP8 cannot change the routing, so gradients can be compared."""
ONE_OF_MANY = {"num_moe_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 64}
GATE = {"moe_shared_expert_gate": True} if hasattr(TransformerConfig, "moe_shared_expert_gate") else {}
BIASED_EXPERTS = not older_than("0.15")  # 0.14 refuses them


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ALL, ["0.mlp.experts", "1.mlp.experts"]),
        (ALL | {"megatron_spec": True}, ["0.mlp.experts", "1.mlp.experts"]),
        (ALL | {"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 128}, ["0.mlp", "1.mlp.experts"]),
        (
            ALL | SHARED | GATE | {"moe_layer_freq": 2},
            ["0.mlp.experts", "0.mlp.shared_experts", "1.mlp"],
        ),
        (ALL | {"gated_linear_unit": False, "activation_func": F.gelu}, ["0.mlp.experts", "1.mlp.experts"]),
    ],
    ids=["ours", "megatron_spec", "some_layers", "shared", "gelu"],
)
def test_experts_run_the_flow(options, expected, device):
    """Report; loss within 0.5 % of BF16's and gradients of every parameter, also the router's, within 0.97 in cosine;
    undone to the bit."""
    mask = options.get("megatron_spec", False)
    model, batch = tiny_gpt(**options), tiny_batch(0, device)
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    loss, grads = gradients(model, batch, mask)
    with patched(model, SETTINGS) as report:
        assert sorted(report.patched) == sorted(ATTENTION + [f"decoder.layers.{name}" for name in expected])
        routed = {name.split(".")[0] for name in expected if "experts" in name}
        assert report.left == {f"decoder.layers.{i}.mlp.router": "routing is not quantized" for i in sorted(routed)}
        assert "mlp.router: routing is not quantized" in str(report)
        fp8_loss, fp8_grads = gradients(model, batch, mask)
        assert list(model.state_dict()) == keys
    assert fp8_loss != loss and fp8_loss == pytest.approx(loss, rel=5e-3)
    for n, g in grads.items():
        assert F.cosine_similarity(g.flatten().double(), fp8_grads[n].flatten().double(), dim=0) > 0.97, n
    assert [type(m) for m in model.modules()] == classes
    if device == "cpu":
        assert gradients(model, batch, mask)[0] == loss


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_experts_without_tokens(scales, device):
    """Sixteen experts, 64 tokens of few kinds: some get none, others numbers that 16 does not divide."""
    model, batch = tiny_gpt(**ONE_OF_MANY), tiny_batch(0, device)
    counts = []
    for layer in model.decoder.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: counts.extend(args[1].tolist()))
    loss, _ = gradients(model, batch)
    with patched(model, ActivationConfig(forward_scales=scales)):
        counts.clear()
        fp8_loss, grads = gradients(model, batch)
    assert 0 in counts and any(n % 16 for n in counts)
    assert fp8_loss == pytest.approx(loss, rel=5e-3)
    assert all(g.isfinite().all() for g in grads.values())
    for i, n in enumerate(counts):
        layer, expert = divmod(i, 16)
        weight = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        assert bool(grads[weight].any()) == (n > 0), (weight, n)


@pytest.mark.parametrize("tokens", [0, 1, 17, 40])
@pytest.mark.parametrize("biased", [False, True] if BIASED_EXPERTS else [False])
def test_one_expert_against_its_definition(tokens, biased, device):
    """act(x W1 + b1) * p, then W2, then p * b2: in fp32, for any number of tokens."""
    model = tiny_gpt(add_bias_linear=biased, **ALL)
    expert = model.decoder.layers[0].mlp.experts.local_experts[0]
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    patch_model(model, SETTINGS)
    assert type(expert) is ExpertMLP
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    p = torch.rand(tokens, device=device, requires_grad=True)
    out, bias = expert(x, p)
    assert bias is None and out.shape == x.shape and out.dtype == x.dtype
    weighting, *others = (torch.randn_like(out) for _ in range(16))
    wanted = [x, p, *expert.parameters()]
    got = torch.autograd.grad(out, wanted, weighting, retain_graph=True)
    scores = torch.stack([got[1], *(torch.autograd.grad(out, p, w, retain_graph=True)[0] for w in others)])

    leaves = [t.detach().float().requires_grad_() for t in wanted]
    (x32, p32), names = leaves[:2], [n for n, _ in expert.named_parameters()]
    named = dict(zip(names, leaves[2:], strict=True))
    pre = F.linear(x32, named["linear_fc1.weight"], named.get("linear_fc1.bias"))
    gate, up = pre.chunk(2, -1)
    y = F.linear(F.silu(gate) * up, named["linear_fc2.weight"], named.get("linear_fc2.bias"))
    expected = y * p32[:, None]
    reference = torch.autograd.grad(expected, leaves, weighting.float())
    for a, b in zip((out, *got), (expected, *reference), strict=True):
        assert a.shape == b.shape
        assert b is reference[1] or (a.float() - b).norm() <= 0.12 * b.norm()
    # A token's gradient of p is a sum of terms of either sign: its error is to be small beside their size. Of one token
    # it is one number, which may err by chance; so of many weightings.
    terms = y * torch.stack([weighting, *others]).float()
    assert (scores - terms.sum(-1)).norm() <= 0.12 * terms.norm()


def test_reasons_of_experts_that_are_left():
    class Grouped(SequentialMLP):
        pass

    model = tiny_gpt(**ALL, **SHARED)
    first, second = (layer.mlp for layer in model.decoder.layers)
    first.experts.__class__ = Grouped
    first.shared_experts.config.moe_shared_expert_overlap = True
    second.experts.config = copy.copy(second.experts.config)
    second.experts.local_experts[1].config = copy.copy(second.experts.config)
    second.experts.local_experts[1].config.activation_func = F.relu
    report = patch_model(model, ActivationConfig())
    assert report.left == {
        "decoder.layers.0.mlp.experts": "experts class Grouped",
        "decoder.layers.0.mlp.shared_experts": "config.moe_shared_expert_overlap=True",
        "decoder.layers.0.mlp.router": "routing is not quantized",
        "decoder.layers.1.mlp.experts": "activation_func relu with gated_linear_unit",
        "decoder.layers.1.mlp.router": "routing is not quantized",
    }
    unpatch_model(model)
    report = patch_model(model, ActivationConfig(bf16_layers=(1,)))
    assert {r for n, r in report.left.items() if ".1." in n} == {"bf16_layers"}
    unpatch_model(model)
    with pytest.raises(ValueError, match="tp_invariant with a mixture of experts"):
        patch_model(model, ActivationConfig(tp_invariant=True))


def latent_attention() -> torch.nn.Module:
    """A model with multi-latent attention, without Transformer Engine: SDPA in place of Megatron's core attention."""
    config = MLATransformerConfig(
        **TINY,
        multi_latent_attention=True, q_lora_rank=64, kv_lora_rank=32, qk_head_dim=32, qk_pos_emb_head_dim=16,
        v_head_dim=32, rope_type="rope", apply_rope_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = SDPA
    options: dict[str, Any] = dict(vocab_size=VOCAB, max_sequence_length=SEQ, position_embedding_type="rope")
    return GPTModel(config, spec, **options).bfloat16()


def test_multi_latent_attention_is_left_and_its_mlp_runs_the_flow(device, monkeypatch):
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # megatron-core 0.16 takes it for granted
    model, batch = latent_attention().to(device), tiny_batch(0, device)
    loss, grads = gradients(model, batch)
    with patched(model, SETTINGS) as report:
        assert report.patched == [f"decoder.layers.{i}.mlp" for i in range(2)]
        assert report.left == dict.fromkeys(ATTENTION, "multi-latent attention")
        fp8_loss, fp8_grads = gradients(model, batch)
    assert fp8_loss != loss and fp8_loss == pytest.approx(loss, rel=5e-3)
    for n, g in grads.items():
        assert F.cosine_similarity(g.flatten().double(), fp8_grads[n].flatten().double(), dim=0) > 0.97, n
