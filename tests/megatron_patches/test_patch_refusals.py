"""What patching leaves alone or refuses, and the reasons it gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model

from .tiny import BATCH, BLOCKS, HIDDEN, SEQ, tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_func": F.relu}, "activation_func relu with gated_linear_unit"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value set"),
        ({"ffn_hidden_size": 248}, "linear_fc2 is 256 x 248 a rank, not multiples of 16"),
    ],
)
def test_blocks_that_cannot_run_the_flow_are_left_with_their_reason(options, reason, device):
    if not set(options) <= {f.name for f in dataclasses.fields(TransformerConfig)}:
        pytest.skip("this megatron-core has no such setting")
    model = tiny_gpt(**options)
    report = patch_model(model, SETTINGS)
    assert report.patched == BLOCKS[::2] and report.left == dict.fromkeys(BLOCKS[1::2], reason)
    assert f"decoder.layers.[0-1].mlp: {reason}" in str(report)
    tiny_loss(model, tiny_batch(0, device)).backward()


def test_a_model_with_nothing_to_patch_is_an_error_that_says_why():
    """By configuration: test_fields.py."""
    model = tiny_gpt().half()
    with pytest.raises(ValueError, match=r"nothing to patch(.|\n)*decoder.layers.\[0-1\].mlp: float16 parameters"):
        patch_model(model, SETTINGS)
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())


def test_subclasses_are_not_touched():
    """A subclass of a Megatron module may compute anything; only the exact classes are replaced."""

    class Special(ColumnParallelLinear):
        pass

    class Layer(TransformerLayer):
        pass

    model = tiny_gpt()
    model.decoder.layers[0].self_attention.linear_qkv.__class__ = Special
    model.decoder.layers[1].__class__ = Layer
    report = patch_model(model, SETTINGS)
    assert report.patched == [BLOCKS[1]]
    assert report.left == {
        BLOCKS[0]: "linear_qkv class Special",
        BLOCKS[2]: "layer class Layer",
        BLOCKS[3]: "layer class Layer",
    }


@pytest.mark.parametrize(("layers", "kept"), [((-1,), {2}), ((0, -1), {0, 2}), ((1, -2), {1})])
def test_bf16_layers(layers, kept):
    report = patch_model(tiny_gpt(num_layers=3), ActivationConfig(bf16_layers=layers))
    expected = {f"decoder.layers.{i}.{b}": "bf16_layers" for i in kept for b in ("self_attention", "mlp")}
    assert report.left == expected
    assert len(report.patched) == 6 - len(expected)


def test_bf16_layers_out_of_range_or_all():
    with pytest.raises(ValueError, match="^activation.bf16_layers: got -3, accepted: 0 to 1, or -2 to -1 from"):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(-3,)))
    with pytest.raises(ValueError, match=r"^model: nothing to patch \(bf16_layers\)\nFP8 flow: 0 of 4 blocks patched"):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(0, -1)))


def test_patching_twice_unpatching_twice_and_patching_nothing():
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model, SETTINGS)
    unpatch_model(model)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(model)
    with pytest.raises(ValueError, match="Linear, which holds no Megatron transformer layer"):
        patch_model(torch.nn.Linear(4, 4), SETTINGS)
    with pytest.raises(ValueError, match="enabled"):
        patch_model(model, ActivationConfig(enabled=False))


@pytest.mark.parametrize(
    ("options", "settings", "reason"),
    [
        ({}, {"bf16_layers": (0,)}, "bf16_layers"),
        ({"add_bias_linear": True}, {}, "tp_invariant with a bias of linear_fc2"),
        ({"attention_dropout": 0.1}, {}, "tp_invariant with config.attention_dropout=0.1"),
        ({"ffn_hidden_size": 272}, {}, "272 FFN elements a rank, no multiple of group_size 32"),
        ({"megatron_spec": True, "qk_layernorm": True}, {}, "tp_invariant with q_layernorm of class RMSNorm"),
    ],
)
def test_tp_invariant_refuses_a_model_with_bf16_blocks(options, settings, reason):
    model = tiny_gpt(**options)
    with pytest.raises(ValueError) as error:
        patch_model(model, ActivationConfig(tp_invariant=True, **settings))
    assert "tp_invariant" in str(error.value) and reason in str(error.value)
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())


def test_arguments_that_a_patched_module_cannot_honour(device):
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    layer, x = model.decoder.layers[0], torch.zeros(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="per_token_scale"):
        layer.mlp(x, per_token_scale=x[..., 0])
    with pytest.raises(ValueError, match="runtime_gather_output"):
        layer.self_attention.linear_qkv(x, runtime_gather_output=True)
    assert torch.equal(layer.mlp(x, padding_mask=None)[0], layer.mlp(x)[0])
