"""Patching a built model: what changes, and what does not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu

from coat_dist.config import ActivationConfig
from coat_dist.reference.activation import ACTIVATIONS, FUNCTIONS
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.layers.activations import activation_name
from megatron_patches.layers.norm import Folded, Norm

from .tiny import BLOCKS, tiny_batch, tiny_config, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
TANH = functools.partial(F.gelu, approximate="tanh")


def test_weights_survive_a_state_dict_round_trip_between_patched_and_unpatched(device):
    source, target, batch = tiny_gpt(seed=1), tiny_gpt(seed=2), tiny_batch(0, device)
    expected = tiny_loss(source, batch).item()
    patch_model(source, SETTINGS)
    state = {k: None if v is None else v.clone() for k, v in source.state_dict().items()}
    target.load_state_dict(state, strict=True)
    assert tiny_loss(target, batch).item() == expected
    patch_model(target, SETTINGS)
    assert tiny_loss(target, batch).item() == tiny_loss(source, batch).item() != expected


def test_sharded_state_dict_is_unchanged():
    from megatron.core import parallel_state

    model = tiny_gpt()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    def keys():
        found = model.sharded_state_dict(metadata=metadata)
        return {name: getattr(value, "key", None) for name, value in found.items()}

    before = keys()
    with pytest.raises(KeyError), patched(model, SETTINGS):
        assert keys() == before and "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in before.values()
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
        (F.silu, True, False, F.silu),
        (F.silu, True, True, F.silu),
        (F.gelu, True, False, F.gelu),
        (F.gelu, True, True, TANH),  # what Megatron's fused kernel computes
        (F.gelu, False, False, F.gelu),
        (F.gelu, False, True, TANH),
        (TANH, False, False, TANH),
        (functools.partial(F.gelu), True, False, F.gelu),
        (fast_gelu, True, False, TANH),
        (fast_gelu, False, False, TANH),
        (quick_gelu, True, False, quick_gelu),
        (quick_gelu, False, False, quick_gelu),
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
    ("function", "gated"), [(F.relu, True), (F.relu, False), (squared_relu, True), (F.silu, False)]
)
def test_other_activations_have_no_name(function, gated):
    config = tiny_config()
    config.activation_func, config.gated_linear_unit = function, gated
    with pytest.raises(ValueError, match="activation_func .* gated_linear_unit"):
        activation_name(config)


def test_an_mlp_with_another_activation_than_its_configuration(device):
    model = tiny_gpt(gated_linear_unit=False, activation_func=F.gelu)
    model.decoder.layers[0].mlp.activation_func = F.silu
    report = patch_model(model, SETTINGS)
    assert report.left == {"decoder.layers.0.mlp": "an activation_func that is not config.activation_func"}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({}, "mlp"),
        ({"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 64}, "mlp.shared_experts"),
        ({"num_moe_experts": 2, "moe_grouped_gemm": True}, "mlp.experts"),
    ],
)
def test_an_activation_that_is_changed_after_patching(options, path, device):
    """A profiler replaces functions of torch.nn.functional; this replaces those that the model holds."""
    model = tiny_gpt(**options)
    patch_model(model, SETTINGS)
    mlp = model.decoder.layers[1].get_submodule(path)
    for holder in (mlp.config, mlp):
        before, holder.activation_func = getattr(holder, "activation_func", None), F.gelu
        if holder is mlp.config or path != "mlp.experts":
            with pytest.raises(ValueError, match="^activation_func: got gelu, accepted: silu, which it was when"):
                tiny_loss(model, tiny_batch(0, device))
        holder.activation_func = before
    unpatch_model(model)
