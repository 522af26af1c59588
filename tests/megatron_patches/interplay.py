"""Kinds of models, and training steps on them that must be equal to the bit whatever is around the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .tiny import tiny_loss

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"normalization": "LayerNorm", "gated_linear_unit": False, "activation_func": F.gelu,
             "add_bias_linear": True, "gpt": {"share_embeddings_and_output_weights": True}},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 64},
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def losses_and_gradients(model, *batches):
    """Of one backward pass a batch: the losses, and by name the gradients summed over batches."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = tiny_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(got, expected, device):
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        if gradient is None:
            assert got[1][name] is None, name
        elif device == "cpu":  # a GPU's attention backward is not deterministic
            assert got[1][name] is not None and torch.equal(got[1][name], gradient), name
        else:
            torch.testing.assert_close(got[1][name], gradient, rtol=5e-2, atol=1e-3)
