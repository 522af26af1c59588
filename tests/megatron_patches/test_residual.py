"""The residual connection of patched layers: its gradient is added in the norm's backward, and
nothing else changes.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model
from megatron_patches.layers.residual import AliasedAdd

from .tiny import (
    BLOCKS,
    FAMILIES,
    FP32,
    FULL,
    gradients,
    selective,
    tiny_batch,
    tiny_gpt,
    tiny_loss,
)

SETTINGS = ActivationConfig()
OPTIONS = {
    **{name: (FAMILIES[name], SETTINGS) for name in ("gpt2", "experts")},
    "compiled_addition": (
        {"bias_dropout_fusion": True, "add_bias_linear": True, "hidden_dropout": 0.1},
        SETTINGS,
    ),
    "qk_norm": ({"qk_layernorm": True, "num_query_groups": 2}, SETTINGS),
    "fp8_attention": ({}, ActivationConfig(attention="fp8")),
    "first_in_bf16": ({}, ActivationConfig(bf16_layers=(0,))),
    "full": (FULL, SETTINGS),
    "selective": (selective("mlp", "core_attn") | {"hidden_dropout": 0.1}, SETTINGS),
}


@pytest.fixture
def residuals(monkeypatch):
    """For every backward of a norm in a patched block, whether it was given the residual's
    gradient.
    """
    module, seen = importlib.import_module("coat_dist.flow.core.inputs"), []
    original = module.NormedInput.backward

    def backward(self, dy, wanted, residual=None):
        seen.append(residual is not None)
        return original(self, dy, wanted, residual)

    monkeypatch.setattr(module.NormedInput, "backward", backward)
    return seen


def take_apart(model):
    """Leave the residual's gradient to autograd: Megatron's own additions, and no block hands an
    alias on.
    """
    for layer in model.decoder.layers:
        layer.self_attn_bda = layer.mlp_bda = get_bias_dropout_add
        for block in (layer.self_attention, layer.mlp):
            if hasattr(block, "coat"):
                block.coat = replace(block.coat, residual=False)


def check_same_as_apart(found, apart):
    assert found[0] == apart[0]
    for name, gradient in found[1].items():
        if gradient.is_cuda:  # a GPU's attention backward is not deterministic
            assert (gradient - apart[1][name]).norm() <= 2e-2 * gradient.norm(), name
        else:
            assert torch.equal(gradient, apart[1][name]), name


@pytest.mark.parametrize("name", OPTIONS)
def test_residual_fusion_has_the_same_bits_in_fp32(name, residuals, device):
    """In fp32 one rounding or two are the same; in BF16 tests of the flow say what is rounded."""
    options, settings = OPTIONS[name]
    if name == "fp8_attention" and device != "cpu":
        pytest.skip("cuDNN attention takes BF16")
    if name == "compiled_addition" and device == "cpu":
        pytest.skip("compiles C++")
    model, batch = tiny_gpt(**options | FP32), tiny_batch(0, device)
    report = patch_model(model, settings)
    assert not any("bda" in block for block in report.unfused)
    found = gradients(model, batch)
    blocks = sum(block in BLOCKS for block in report.patched)  # experts have no norm of their own
    assert residuals == [True] * blocks and blocks >= 2
    take_apart(model)
    residuals.clear()
    check_same_as_apart(found, gradients(model, batch))
    assert residuals == [False] * blocks


def test_residual_stays_apart_at_other_additions(residuals, device):
    model = tiny_gpt(add_bias_linear=True)
    first, second = model.decoder.layers

    def mine(training, fused):
        return get_bias_dropout_add(training, fused)

    first.self_attn_bda = mine
    report = patch_model(model, SETTINGS)
    assert report.unfused == {"decoder.layers.0.self_attn_bda": "self_attn_bda mine"}
    assert (
        "  unfused  decoder.layers.[0].self_attn_bda: self_attn_bda mine"
        in str(report).splitlines()
    )
    assert first.self_attn_bda is mine and isinstance(first.mlp_bda, AliasedAdd)
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert residuals == [True, True, True, False]
    unpatch_model(model)
    assert (
        first.self_attn_bda is mine
        and first.mlp_bda is get_bias_dropout_add is second.self_attn_bda
    )


@pytest.mark.parametrize("where", ["self_attention", "self_attention.linear_qkv", "mlp", "output"])
def test_residual_fusion_ends_at_hooks_that_replace_tensors(where, residuals, device):
    """As ZeRO-3's hooks do. A hook may also compute: the residual is what Megatron holds, not
    what the hook made.
    """
    model, batch = tiny_gpt(**FP32), tiny_batch(0, device)
    patch_model(model, SETTINGS)
    layer = model.decoder.layers[0]
    if where == "output":
        layer.mlp.register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:]))
    else:
        layer.get_submodule(where).register_forward_pre_hook(
            lambda module, args: (args[0] * 2, *args[1:])
        )
    found = gradients(model, batch)
    attention = where.startswith("self_attention")
    assert residuals == [True, True, attention, not attention]
    take_apart(model)
    check_same_as_apart(found, gradients(model, batch))
