"""Mixtures of experts: without tokens, with biases, and reasons of those that stay BF16."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.compat import older_than

from .tiny import HIDDEN, gradients, tiny_batch, tiny_gpt

LAYERS = "decoder.layers"
ALL = {"num_moe_experts": 3, "moe_router_topk": 3}
ONE_OF_MANY = {"num_moe_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 64}


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_experts_without_tokens(scales, device):
    """Sixteen experts, 64 tokens of few kinds: some get none, others numbers that 16 does not
    divide.
    """
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


@pytest.mark.skipif(older_than("0.15"), reason="0.14 refuses biases of experts")
def test_expert_with_biases_against_its_definition(device):
    """act(x W1 + b1) * p, then W2, in fp32. (Megatron's own experts fail with biases.)"""
    model = tiny_gpt(add_bias_linear=True, **ALL)
    expert = model.decoder.layers[0].mlp.experts.local_experts[0]
    named = dict(expert.named_parameters())
    with torch.no_grad():
        for bias in ("linear_fc1.bias", "linear_fc2.bias"):
            named[bias].normal_()
    patch_model(model, ActivationConfig())
    x = torch.randn(17, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    p = torch.rand(17, device=device, requires_grad=True)
    out, bias = expert(x, p)
    assert bias is None and out.shape == x.shape and out.dtype == x.dtype
    weighting = torch.randn_like(out)
    got = torch.autograd.grad(out, [x, p, *named.values()], weighting)

    leaves = [t.detach().float().requires_grad_() for t in (x, p, *named.values())]
    x32, p32, *rest = leaves
    weights = dict(zip(named, rest, strict=True))
    pre = F.linear(x32, weights["linear_fc1.weight"], weights["linear_fc1.bias"])
    gate, up = pre.chunk(2, -1)
    y = F.linear(F.silu(gate) * up, weights["linear_fc2.weight"], weights["linear_fc2.bias"])
    expected = y * p32[:, None]
    wanted = torch.autograd.grad(expected, leaves, weighting.float())
    for i, (a, b) in enumerate(zip((out, *got), (expected, *wanted), strict=True)):
        # A token's gradient of p is a sum of terms of either sign: its error is to be small beside
        # their size.
        size = (y * weighting.float()).norm() if i == 2 else b.norm()
        assert a.shape == b.shape and (a.float() - b).norm() <= 0.12 * size


def test_patch_model_leaves_experts_with_a_reason():
    class Other(SequentialMLP):
        pass

    model = tiny_gpt(**ALL, **SHARED)
    first, second = (layer.mlp for layer in model.decoder.layers)
    first.experts.__class__ = Other
    first.shared_experts.config.moe_shared_expert_overlap = True
    second.experts.local_experts[1].config = copy.copy(second.experts.config)
    second.experts.local_experts[1].config.activation_func = F.relu
    report = patch_model(model, ActivationConfig())
    assert report.left == dict.fromkeys(
        [f"{LAYERS}.{i}.mlp.router" for i in range(2)], "routing is not quantized"
    ) | {
        f"{LAYERS}.0.mlp.experts": "experts class Other",
        f"{LAYERS}.0.mlp.shared_experts": "config.moe_shared_expert_overlap=True",
        f"{LAYERS}.1.mlp.experts": "activation_func relu with gated_linear_unit",
    }
    model = tiny_gpt(**ALL)  # Megatron's default, the allgather dispatcher
    patch_model(model, ActivationConfig(expert_dispatch="fp8"))  # no token travels
    unpatch_model(model)
    model.decoder.layers[1].mlp.token_dispatcher.ep_size = 2
    with pytest.raises(
        ValueError, match='activation.expert_dispatch_grad: got "fp8", accepted: .*mlp.experts'
    ):
        patch_model(model, ActivationConfig(expert_dispatch_grad="fp8"))
