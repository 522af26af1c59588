"""The residual connection of patched layers: its gradient is added in the norm's backward, and nothing else changes."""

from __future__ import annotations

import gc
import importlib
import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import nn

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.layers import mlp
from megatron_patches.layers.residual import AliasedAdd
from tests.support import Adds

from .interplay import MODELS
from .tiny import BATCH, BLOCKS, HIDDEN, SEQ, gradients, tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
FP32 = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
OPTIONS = {
    **{name: (options, SETTINGS) for name, options in MODELS.items()},
    "dropout": ({"hidden_dropout": 0.1, "add_bias_linear": True}, SETTINGS),
    "compiled_addition": ({"bias_dropout_fusion": True, "add_bias_linear": True}, SETTINGS),
    "qk_norm": ({"qk_layernorm": True, "num_query_groups": 2}, SETTINGS),
    "fp8_attention": ({}, ActivationConfig(attention="fp8")),
    "tensor_scales": ({}, ActivationConfig(forward_scales="tensor")),
    "first_in_bf16": ({}, ActivationConfig(bf16_layers=(0,))),
    "full": ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, SETTINGS),
    "selective": ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]}, SETTINGS),
}


@pytest.fixture
def residuals(monkeypatch):
    """For every backward of a norm in a patched block, whether it was given the residual's gradient."""
    module, seen = importlib.import_module("coat_dist.flow.inputs"), []
    original = module.NormedInput.backward

    def backward(self, dy, wanted, residual=None):
        seen.append(residual is not None)
        return original(self, dy, wanted, residual)

    monkeypatch.setattr(module.NormedInput, "backward", backward)
    return seen


def take_apart(model):
    """Leave the residual's gradient to autograd: Megatron's own additions, and no block hands an alias on."""
    for layer in model.decoder.layers:
        layer.self_attn_bda = layer.mlp_bda = get_bias_dropout_add
        for block in (layer.self_attention, layer.mlp):
            if hasattr(block, "coat"):
                block.coat = replace(block.coat, residual=False)


def run(model, batch, seed=3):
    torch.manual_seed(seed)  # dropout
    return gradients(model, batch)


@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits_as_apart_in_fp32(name, residuals, device):
    """In fp32 one rounding or two are the same; in BF16 tests of the flow say what is rounded."""
    options, settings = OPTIONS[name]
    if name == "fp8_attention" and device != "cpu":
        pytest.skip("cuDNN attention takes BF16")
    if name == "compiled_addition" and device == "cpu":
        pytest.skip("compiles C++")
    model, batch = tiny_gpt(**options | FP32), tiny_batch(0, device)
    report = patch_model(model, settings)
    assert not any("bda" in block for block in report.unfused)
    loss, grads = run(model, batch)
    blocks = sum(block in BLOCKS for block in report.patched)  # experts have no norm of their own
    assert residuals == [True] * blocks and blocks >= 2
    take_apart(model)
    residuals.clear()
    apart_loss, apart = run(model, batch)
    assert residuals == [False] * blocks and apart_loss == loss
    for n, g in grads.items():
        if device == "cpu":  # a GPU's attention backward is not deterministic
            assert torch.equal(g, apart[n]), n
        else:
            assert (g - apart[n]).norm() <= 2e-2 * apart[n].norm(), n


def test_autograd_adds_nothing_to_the_gradient_of_a_layers_input(device):
    model, counts = tiny_gpt(), []
    patch_model(model, SETTINGS)
    for apart in (False, True):
        if apart:
            take_apart(model)
        loss = tiny_loss(model, tiny_batch(0, device))
        with Adds(SEQ * BATCH * HIDDEN) as adds, torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        counts.append(adds.count)
    assert counts[1] - counts[0] == len(BLOCKS)


def test_nothing_is_kept_alive_after_the_layer(monkeypatch, device):
    made = []
    original = mlp.Residual

    def spy(x, alias=None):
        made.append((weakref.ref(x), None if alias is None else weakref.ref(alias)))
        return original(x, alias)

    monkeypatch.setattr(mlp, "Residual", spy)
    monkeypatch.setattr("megatron_patches.layers.attention.Residual", spy)
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    loss = tiny_loss(model, tiny_batch(0, device))
    gc.collect()
    assert len(made) == len(BLOCKS) and all(x() is None and (alias is None or alias() is None) for x, alias in made)
    loss.backward()


def test_unpatching_puts_the_functions_back():
    model = tiny_gpt(recompute_granularity="selective", recompute_modules=["mlp"])
    before = [dict(vars(layer)) for layer in model.decoder.layers]
    with patched(model, SETTINGS):
        for layer in model.decoder.layers:
            assert isinstance(layer.self_attn_bda, AliasedAdd) and isinstance(layer.mlp_bda, AliasedAdd)
    for layer, attributes in zip(model.decoder.layers, before, strict=True):
        assert layer.self_attn_bda is layer.mlp_bda is get_bias_dropout_add
        assert vars(layer).keys() == attributes.keys()
        assert all(v is attributes[k] for k, v in vars(layer).items()) and layer.recompute_mlp


def test_other_additions_stay_and_the_report_says_so(residuals, device):
    model = tiny_gpt(add_bias_linear=True)
    first, second = model.decoder.layers

    def mine(training, fused):
        return get_bias_dropout_add(training, fused)

    class Mine(nn.Module):
        def forward(self, training, fused):
            return get_bias_dropout_add(training, fused)

    first.self_attn_bda, module = mine, Mine()
    del second.mlp_bda
    second.mlp_bda = module
    report = patch_model(model, SETTINGS)
    assert report.unfused == {
        "decoder.layers.0.self_attn_bda": "self_attn_bda mine",
        "decoder.layers.1.mlp_bda": "mlp_bda Mine",
    }
    assert "  unfused  decoder.layers.[0].self_attn_bda: self_attn_bda mine" in str(report).splitlines()
    assert first.self_attn_bda is mine and isinstance(first.mlp_bda, AliasedAdd)
    assert isinstance(second.self_attn_bda, AliasedAdd) and second.mlp_bda is module
    tiny_loss(model, tiny_batch(0, device)).backward()
    assert residuals == [False, True, True, False]
    unpatch_model(model)
    assert first.self_attn_bda is mine and first.mlp_bda is get_bias_dropout_add is second.self_attn_bda
    assert second.mlp_bda is module


@pytest.mark.parametrize("where", ["self_attention", "self_attention.linear_qkv", "mlp", "output"])
def test_hooks_that_replace_tensors_end_the_fusion_and_change_nothing(where, residuals, device):
    """As ZeRO-3's hooks do. A hook may also compute: the residual is what Megatron holds, not what the hook made."""
    model, batch = tiny_gpt(**FP32), tiny_batch(0, device)
    patch_model(model, SETTINGS)
    layer = model.decoder.layers[0]
    if where == "output":
        layer.mlp.register_forward_hook(lambda module, args, out: (out[0] * 2, *out[1:]))
    else:
        layer.get_submodule(where).register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    loss, grads = run(model, batch)
    attention = where.startswith("self_attention")
    assert residuals == [True, True, attention, not attention]
    take_apart(model)
    apart_loss, apart = run(model, batch)
    assert loss == apart_loss
    assert device != "cpu" or all(torch.equal(g, apart[n]) for n, g in grads.items())


def test_backward_hooks_of_modules_work(residuals, device):
    """Full backward hooks wrap inputs and outputs in a function of their own."""
    model, batch, seen = tiny_gpt(**FP32), tiny_batch(0, device), []
    patch_model(model, SETTINGS)
    _, grads = run(model, batch)
    for name, module in model.named_modules():
        if name in BLOCKS:
            module.register_full_backward_hook(lambda *_: seen.append(1))
    residuals.clear()
    _, hooked = run(model, batch)
    assert len(seen) == len(BLOCKS) == len(residuals)
    assert device != "cpu" or all(torch.equal(g, hooked[n]) for n, g in grads.items())
