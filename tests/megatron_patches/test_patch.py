"""Patching a built model: what changes, what does not, what is left alone or refused, and why."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from coat_dist.config import ActivationConfig
from coat_dist.reference.activation import ACTIVATIONS, FUNCTIONS
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.layers.activations import activation_name
from megatron_patches.layers.norm import Folded, Norm

from .tiny import BLOCKS, tiny_batch, tiny_config, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
TANH = functools.partial(F.gelu, approximate="tanh")


def test_sharded_state_dict_is_unchanged():
    from megatron.core import parallel_state

    model = tiny_gpt()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    def keys():
        found = model.sharded_state_dict(metadata=metadata)
        return {name: getattr(value, "key", None) for name, value in found.items()}

    before = keys()
    with pytest.raises(KeyError), patched(model, SETTINGS):
        assert (
            keys() == before
            and "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in before.values()
        )
        raise KeyError
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())


def test_tp_invariant_replaces_the_output_layer_and_every_norm():
    model = tiny_gpt(qk_layernorm=True)
    report = patch_model(model, ActivationConfig(tp_invariant=True))
    assert report.patched == [*BLOCKS, "output_layer"]
    norms = [m for m in model.modules() if isinstance(m, Norm) and not isinstance(m, Folded)]
    assert len(norms) == 5 and all(norm.exact for norm in norms)


@pytest.mark.parametrize(
    ("function", "gated", "fused", "expected"),
    [
        (F.silu, True, True, F.silu),
        (F.gelu, True, False, F.gelu),
        (F.gelu, True, True, TANH),  # what Megatron's fused kernel computes
        (F.gelu, False, False, F.gelu),
        (F.gelu, False, True, TANH),
        (TANH, False, False, TANH),
        (functools.partial(F.gelu), True, False, F.gelu),
        (fast_gelu, False, False, TANH),
        (quick_gelu, True, False, quick_gelu),
        (squared_relu, False, False, squared_relu),
    ],
)
def test_the_flow_computes_the_configured_activation(function, gated, fused, expected):
    config = tiny_config(activation_func=function, gated_linear_unit=gated)
    config.bias_activation_fusion = fused
    x = torch.randn(1000)
    kind = ACTIVATIONS[activation_name(config)]
    torch.testing.assert_close(FUNCTIONS[kind.function](x)[0], expected(x))
    assert kind.gated == gated


@pytest.mark.parametrize(
    ("function", "gated"), [(F.relu, True), (squared_relu, True), (F.silu, False)]
)
def test_other_activations_have_no_name(function, gated):
    config = tiny_config()
    config.activation_func, config.gated_linear_unit = function, gated
    with pytest.raises(ValueError, match="activation_func .* gated_linear_unit"):
        activation_name(config)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "mlp"),
        ({"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 64}, "mlp.shared_experts"),
        ({"num_moe_experts": 2, "moe_grouped_gemm": True}, "mlp.experts"),
    ],
)
def test_an_activation_that_is_changed_after_patching(options, path, device):
    """A profiler replaces functions of torch.nn.functional; this replaces those that the model
    holds.
    """
    model = tiny_gpt(**options)
    patch_model(model, SETTINGS)
    mlp = model.decoder.layers[1].get_submodule(path)
    for holder in (mlp.config, mlp):
        before, holder.activation_func = getattr(holder, "activation_func", None), F.gelu
        if holder is mlp.config or path != "mlp.experts":
            with pytest.raises(
                ValueError, match="^activation_func: got gelu, accepted: silu, which it was when"
            ):
                tiny_loss(model, tiny_batch(0, device))
        holder.activation_func = before
    unpatch_model(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_func": F.relu}, "activation_func relu with gated_linear_unit"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value set"),
        (
            {"ffn_hidden_size": 248},
            "linear_fc2 with a weight [256, 248], whose sizes are not multiples of 16",
        ),
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


class Special(ColumnParallelLinear):
    pass


class Layer(TransformerLayer):
    pass


def test_only_exact_classes_are_replaced():
    """A subclass of a Megatron module may compute anything, and an MLP hold another function
    than its configuration.
    """
    model = tiny_gpt(num_layers=3, gated_linear_unit=False, activation_func=F.gelu)
    first, second, third = model.decoder.layers
    first.self_attention.linear_qkv.__class__ = Special
    second.__class__ = Layer
    third.mlp.activation_func = F.silu
    report = patch_model(model, SETTINGS)
    assert report.patched == [BLOCKS[1], "decoder.layers.2.self_attention"]
    assert report.left == {
        BLOCKS[0]: "linear_qkv class Special",
        BLOCKS[2]: "layer class Layer",
        BLOCKS[3]: "layer class Layer",
        "decoder.layers.2.mlp": "an activation_func that is not config.activation_func",
    }


@pytest.mark.parametrize(("layers", "kept"), [((-1,), {2}), ((0, -1), {0, 2}), ((1, 2), {1, 2})])
def test_bf16_layers(layers, kept):
    report = patch_model(tiny_gpt(num_layers=3), ActivationConfig(bf16_layers=layers))
    expected = {
        f"decoder.layers.{i}.{b}": "bf16_layers" for i in kept for b in ("self_attention", "mlp")
    }
    assert report.left == expected
    assert len(report.patched) == 6 - len(expected)


def test_bf16_layers_out_of_range_or_all():
    with pytest.raises(
        ValueError, match="^activation.bf16_layers: got -3, accepted: 0 to 1, or -2 to -1 from"
    ):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(-3,)))
    with pytest.raises(
        ValueError, match=r"^activation.bf16_layers: got \[1, -1\], accepted: each of 2 layers once"
    ):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(1, -1)))
    with pytest.raises(
        ValueError,
        match=r"^model: nothing to patch \(bf16_layers\)\nFP8 flow: 0 of 4 blocks patched",
    ):
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
    with pytest.raises(ValueError, match="activation.enabled: got false"):
        patch_model(model, ActivationConfig(enabled=False))
    with pytest.raises(
        ValueError, match='^coat.activation.evaluation: got "flow", accepted: "plain"'
    ):
        patch_model(model, ActivationConfig(evaluation="flow"))
    with pytest.raises(
        ValueError, match=r"nothing to patch(.|\n)*decoder.layers.\[0-1\].mlp: float16 parameters"
    ):
        patch_model(model.half(), SETTINGS)  # by the configuration: test_fields.py
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "settings", "reason"),
    [
        ({}, {"bf16_layers": (0,)}, "bf16_layers"),
        ({"add_bias_linear": True}, {}, "tp_invariant with a bias of linear_fc2"),
        ({"attention_dropout": 0.1}, {}, "tp_invariant with config.attention_dropout=0.1"),
        ({"ffn_hidden_size": 272}, {}, "272 FFN elements a rank, no multiple of group_size 32"),
        (
            {"megatron_spec": True, "qk_layernorm": True},
            {},
            "tp_invariant with q_layernorm of class RMSNorm",
        ),
    ],
)
def test_tp_invariant_refuses_a_model_with_bf16_blocks(options, settings, reason):
    model = tiny_gpt(**options)
    with pytest.raises(ValueError) as error:
        patch_model(model, ActivationConfig(tp_invariant=True, **settings))
    assert "tp_invariant" in str(error.value) and reason in str(error.value)
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())
