"""Recompute in patched models with frozen parts gives the gradients of the same model without recompute."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model

from .interplay import assert_same, losses_and_gradients
from .tiny import tiny_batch, tiny_gpt

# Which parameters are trained, by a test on their names.
TRAINED = {
    "all": lambda n: True,
    "not_the_embedding": lambda n: "embedding" not in n,
    "from_the_first_mlp": lambda n: not any(k in n for k in ("embedding", "0.input_layernorm", "0.self_attention")),
    "the_last_layer": lambda n: "layers.1." in n or "final" in n,
    "norms": lambda n: "norm" in n,
    "norms_of_mlps": lambda n: "pre_mlp_layernorm" in n,
    "weights_of_mlps": lambda n: "linear_fc" in n,
    "fc1_of_the_last_layer": lambda n: "1.mlp.linear_fc1" in n,
    "fc2_of_the_last_layer": lambda n: "1.mlp.linear_fc2" in n,
    "biases": lambda n: "bias" in n,
    "output_layer": lambda n: "output_layer" in n,
}


def selective(module):
    return {"recompute_granularity": "selective", "recompute_modules": [module]}


def trained(which, patch=True, **options):
    model = tiny_gpt(add_bias_linear=True, hidden_dropout=0.1, **options)
    if patch:
        assert not patch_model(model, ActivationConfig()).left
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[which](name))
    torch.manual_seed(3)
    return model


@pytest.mark.parametrize(
    ("module", "which"),
    [("mlp", which) for which in TRAINED]
    + [(m, which) for m in ("core_attn", "layernorm") for which in ("from_the_first_mlp", "norms", "biases")],
)
def test_selective_recompute_changes_no_gradient(module, which, device):
    batch = tiny_batch(2, device)
    model = trained(which, **selective(module))
    got = losses_and_gradients(model, batch)
    for name, gradient in got[1].items():
        assert (gradient is not None) == TRAINED[which](name), name
    assert_same(got, losses_and_gradients(trained(which), batch), device)


@pytest.mark.parametrize("module", ["mlp", "core_attn"])
def test_hooks_of_parameters_run_once(module, device):
    """ZeRO and Megatron's DistributedDataParallel count on it."""
    model = trained("from_the_first_mlp", **selective(module))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            parameter.register_hook(lambda gradient: gradient.clone())
            accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulate.register_hook(lambda *_, name=name: seen.append(f"node {name}"))
            parameter.coat_keep = accumulate
    losses_and_gradients(model, tiny_batch(2, device))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(seen) == sorted(names + [f"node {n}" for n in names])
