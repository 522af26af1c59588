"""Mixtures of experts: without tokens, one expert against its definition, and reasons of those
that stay BF16.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.compat import older_than
from megatron_patches.layers.experts import ExpertMLP

from .tiny import HIDDEN, gradients, tiny_batch, tiny_gpt

SETTINGS, LAYERS = ActivationConfig(), "decoder.layers"
ALL = {"num_moe_experts": 3, "moe_router_topk": 3}
ONE_OF_MANY = {"num_moe_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True}
SHARED = {"moe_shared_expert_intermediate_size": 64}
BIASED_EXPERTS = not older_than("0.15")  # 0.14 refuses them


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


@pytest.mark.parametrize(
    ("tokens", "biased"), [(0, False), (1, BIASED_EXPERTS), (17, False), (40, BIASED_EXPERTS)]
)
def test_expert_against_its_definition(tokens, biased, device):
    """act(x W1 + b1) * p, then W2, then p * b2: in fp32, for any number of tokens."""
    model = tiny_gpt(add_bias_linear=biased, **ALL)
    expert = model.decoder.layers[0].mlp.experts.local_experts[0]
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    patch_model(model, SETTINGS)
    assert isinstance(expert, ExpertMLP)
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    p = torch.rand(tokens, device=device, requires_grad=True)
    out, bias = expert(x, p)
    assert bias is None and out.shape == x.shape and out.dtype == x.dtype
    weighting, *others = (torch.randn_like(out) for _ in range(16))
    wanted = [x, p, *expert.parameters()]
    got = torch.autograd.grad(out, wanted, weighting, retain_graph=True)
    scores = torch.stack(
        [got[1], *(torch.autograd.grad(out, p, w, retain_graph=True)[0] for w in others)]
    )

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
    # A token's gradient of p is a sum of terms of either sign: its error is to be small beside
    # their size. Of one token it is one number, which may err by chance; so of many weightings.
    terms = y * torch.stack([weighting, *others]).float()
    assert (scores - terms.sum(-1)).norm() <= 0.12 * terms.norm()


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
