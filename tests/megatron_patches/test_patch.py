"""Patching a built model: what changes, what does not, what is left alone or refused, and why."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from coat_dist.config import ActivationConfig
from coat_dist.patching.report import is_patched
from coat_dist.reference.activation import ACTIVATIONS, FUNCTIONS
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.layers.activations import activation_name

from .tiny import BLOCKS, FULL, selective, state, tiny_batch, tiny_config, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
TANH = functools.partial(F.gelu, approximate="tanh")


def test_patched_keeps_sharded_state_dict():
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
    assert not is_patched(model)


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
def test_activation_name_is_the_configured_function(function, gated, fused, expected):
    config = tiny_config(activation_func=function, gated_linear_unit=gated)
    config.bias_activation_fusion = fused
    x = torch.randn(1000)
    kind = ACTIVATIONS[activation_name(config)]
    torch.testing.assert_close(FUNCTIONS[kind.function](x)[0], expected(x))
    assert kind.gated == gated


@pytest.mark.parametrize(
    ("function", "gated"), [(F.relu, True), (squared_relu, True), (F.silu, False)]
)
def test_activation_name_refuses_other_functions(function, gated):
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
def test_forward_refuses_an_activation_changed_after_patching(options, path, device):
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
def test_patch_model_leaves_blocks_with_a_reason(options, reason, device):
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


def test_patch_model_replaces_exact_classes_only():
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


def later(**fields):
    """Fields that a built configuration has, and that its own checks refuse together."""
    return {"later": fields}


INVARIANT = {"tp_invariant": True}
FP8, NO_FP8 = {"attention": "fp8"}, 'activation.attention: got "fp8", accepted: "bf16" with '
GRAPHS, NO_GRAPHS = {"cuda_graphs": True}, "activation.cuda_graphs: got true, accepted: false with "
REFUSED = [
    ({}, {"enabled": False}, "activation.enabled: got false"),
    ({}, {"evaluation": "flow"}, 'coat.activation.evaluation: got "flow", accepted: "plain"'),
    ({}, {"compile": True}, "coat.activation.compile: got true, accepted: false"),
    ({}, {"bf16_layers": (1, -1)}, "[1, -1], accepted: each of 2 layers once"),
    ({}, {"boundaries": "fp8"}, 'activation.boundaries: got "fp8", accepted: "bf16", or '),
    (FULL, {"recompute": 1}, "coat.activation.recompute: got 1, accepted: null"),
    ({"add_bias_linear": True}, INVARIANT, "tp_invariant with a bias of linear_fc2"),
    ({"attention_dropout": 0.1}, INVARIANT, "tp_invariant with config.attention_dropout=0.1"),
    ({"ffn_hidden_size": 272}, INVARIANT, "272 FFN elements a rank, no multiple of group_size 32"),
    (
        {"megatron_spec": True, "qk_layernorm": True},
        INVARIANT,
        "tp_invariant with q_layernorm of class RMSNorm",
    ),
    ({"num_moe_experts": 3}, INVARIANT, "tp_invariant with a mixture of experts"),
    ({"attention_dropout": 0.1}, FP8, NO_FP8 + "attention_dropout 0.1 (decoder.layers.0"),
    ({"megatron_spec": True}, FP8, NO_FP8 + "core attention class DotProductAttention"),
    (selective("core_attn"), FP8, NO_FP8 + "recompute_modules 'core_attn'"),
    ({"test_mode": True}, FP8, NO_FP8 + "config.test_mode=True"),
    ({"ffn_hidden_size": 248}, GRAPHS, "no layer has attention and MLP patched"),
    (later(tensor_model_parallel_size=2), GRAPHS, NO_GRAPHS + "config.tensor_model_parallel_size="),
    (later(hidden_dropout=0.1), GRAPHS, NO_GRAPHS + "config.hidden_dropout="),
    (later(num_moe_experts=4), GRAPHS, NO_GRAPHS + "config.num_moe_experts="),
    (later(recompute_granularity="selective"), GRAPHS, NO_GRAPHS + "config.recompute_granularity="),
    (
        later(gradient_accumulation_fusion=True),
        GRAPHS,
        NO_GRAPHS + "config.gradient_accumulation_fusion=",
    ),
]


@pytest.mark.parametrize(("options", "settings", "said"), REFUSED)
def test_patch_model_refuses_before_anything_changes(options, settings, said):
    model = tiny_gpt(**{key: value for key, value in options.items() if key != "later"})
    for config in {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }.values():
        vars(config).update(options.get("later", {}))
    before = state(model)
    with pytest.raises(ValueError, match=re.escape(said)):
        patch_model(model, ActivationConfig(**settings))
    assert state(model) == before


def test_patch_model_twice_and_of_other_models():
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    with pytest.raises(ValueError, match="patched already"):
        patch_model(model, SETTINGS)
    unpatch_model(model)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(model)
    with pytest.raises(ValueError, match="Linear, which holds no Megatron transformer layer"):
        patch_model(torch.nn.Linear(4, 4), SETTINGS)
    with pytest.raises(
        ValueError, match=r"nothing to patch(.|\n)*decoder.layers.\[0-1\].mlp: float16 parameters"
    ):
        patch_model(model.half(), SETTINGS)  # by the configuration: test_fields.py
    assert not is_patched(model)
