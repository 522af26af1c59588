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


def leave(reason, blocks, **options):
    return pytest.param(options, blocks, reason, id=reason.replace(" ", "_")[:40])


@pytest.mark.parametrize(
    ("options", "blocks", "reason"),
    [
        leave("activation_func relu with gated_linear_unit", BLOCKS[1::2], activation_func=F.relu),
        leave(
            "activation_func relu without gated_linear_unit",
            BLOCKS[1::2],
            activation_func=F.relu,
            gated_linear_unit=False,
        ),
        leave("activation_func_clamp_value set", BLOCKS[1::2], activation_func_clamp_value=7.0),
        leave("linear_fc2 is 256 x 248 a rank, not multiples of 16", BLOCKS[1::2], ffn_hidden_size=248),
    ],
)
def test_blocks_that_cannot_run_the_flow_are_left_with_their_reason(options, blocks, reason, device):
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    if not set(options) <= known | {"megatron_spec"}:
        pytest.skip("this megatron-core has no such setting")
    model = tiny_gpt(**options)
    report = patch_model(model, SETTINGS)
    assert report.patched == [b for b in BLOCKS if b not in blocks]
    assert report.left == dict.fromkeys(blocks, reason)
    assert f"decoder.layers.[0-1].mlp: {reason}" in str(report)
    tiny_loss(model, tiny_batch(0, device)).backward()
    unpatch_model(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fp8": "hybrid"}, "config.fp8=hybrid"),
        ({"fp16": True}, "config.fp16=True"),
        ({"fp32_residual_connection": True}, "config.fp32_residual_connection=True"),
        ({"cuda_graph_impl": "local"}, "config.cuda_graph_impl=local"),
        ({"cpu_offloading": True}, "config.cpu_offloading=True"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_model_with_nothing_to_patch_is_an_error_that_says_why(change, reason):
    model = tiny_gpt()
    for key, value in change.items():
        setattr(model.config, key, value)
    with pytest.raises(ValueError, match="nothing to patch") as error:
        patch_model(model, SETTINGS)
    assert f"decoder.layers.[0-1].mlp: {reason}" in str(error.value)
    assert not any(getattr(type(m), "coat_patched", False) for m in model.modules())


def test_half_precision_parameters_are_left():
    with pytest.raises(ValueError, match="float16 parameters"):
        patch_model(tiny_gpt().half(), SETTINGS)


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


@pytest.mark.parametrize(("layers", "kept"), [((0,), {0}), ((-1,), {2}), ((0, -1), {0, 2}), ((1, -2), {1})])
def test_bf16_layers(layers, kept):
    report = patch_model(tiny_gpt(num_layers=3), ActivationConfig(bf16_layers=layers))
    expected = {f"decoder.layers.{i}.{b}": "bf16_layers" for i in kept for b in ("self_attention", "mlp")}
    assert report.left == expected
    assert len(report.patched) == 6 - len(expected)


@pytest.mark.parametrize("index", [2, -3, 99])
def test_bf16_layers_out_of_range(index):
    said = rf"^activation.bf16_layers: got {index}, accepted: 0 to 1, or -2 to -1 from the last, for 2 layers$"
    with pytest.raises(ValueError, match=said):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(index,)))


def test_bf16_layers_that_leave_nothing_are_named():
    with pytest.raises(ValueError) as caught:
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(0, -1)))
    assert str(caught.value).startswith(
        "activation.bf16_layers: got [0, -1], every layer, and nothing to patch is left; accepted: fewer layers, or "
        "activation.enabled false\nFP8 flow: 0 of 4 blocks patched"
    )
    model = tiny_gpt()
    model.config.cpu_offloading = True  # of the layers that are not asked for
    with pytest.raises(ValueError, match="^model: nothing to patch"):
        patch_model(model, ActivationConfig(bf16_layers=(0,)))


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
