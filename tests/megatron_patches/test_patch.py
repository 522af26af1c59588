"""Patching a built model: what changes, what does not, and what is refused."""

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
from megatron_patches import PatchReport, patch_model, patched, unpatch_model
from megatron_patches.mlp import activation_name

from .tiny import BATCH, FFN, HEADS, HIDDEN, SEQ, tiny_batch, tiny_config, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
BLOCKS = [f"decoder.layers.{i}.{b}" for i in range(2) for b in ("self_attention", "mlp")]


def gradients(model, batch, megatron_spec=False):
    model.zero_grad(set_to_none=True)
    loss = tiny_loss(model, batch, megatron_spec)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


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
    before = model.sharded_state_dict(metadata=metadata)
    with patched(model, SETTINGS):
        after = model.sharded_state_dict(metadata=metadata)
    assert {k: getattr(v, "key", None) for k, v in before.items()} == {
        k: getattr(v, "key", None) for k, v in after.items()
    }
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in {
        getattr(v, "key", None) for v in after.values()
    }


def test_evaluation_computes_what_training_does(device):
    model, batch = tiny_gpt(), tiny_batch(3, device)
    patch_model(model, SETTINGS)
    training = tiny_loss(model, batch).item()
    model.eval()
    with torch.no_grad():
        assert tiny_loss(model, batch).item() == training


class _Saved:
    """Bytes of the storages that autograd saves, parameters left out."""

    def __init__(self, model):
        self.ignore = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self):
        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.ignore:
                self.storages[storage.data_ptr()] = storage
            return t

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *args):
        self.hooks.__exit__(*args)
        self.bytes = sum(s.nbytes() for s in self.storages.values())


def layer_bytes(settings, **options):
    """Saved bytes of one more layer."""
    sizes = []
    for layers in (1, 2):
        model = tiny_gpt(num_layers=layers, **options)
        if settings is not None:
            patch_model(model, settings)
        with _Saved(model) as saved:
            tiny_loss(model, tiny_batch(0)).backward()
        sizes.append(saved.bytes)
    return sizes[1] - sizes[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention kernels of the GPU keep their own statistics")
@pytest.mark.parametrize("groups", [4, 2])
def test_saved_bytes_are_those_of_the_plan(groups):
    tokens, h, head = BATCH * SEQ, HIDDEN, HIDDEN // HEADS
    kv = groups * head
    inputs = 2 * (h + h // 32 + 4)  # x8, its scales and rstd, for both norms
    attention = 2 * (h + 2 * kv) + 2 * h + 4 * HEADS  # q, k, v and the output in BF16, log-sum-exp in fp32
    mlp = 2 * FFN + 2 * FFN // 32  # gate and up
    scalars = 4 * (2 + 2 + 4)  # scales of y8 and weight; of proj's input and weight; of y8, a and two weights
    expected = tokens * (inputs + attention + mlp) + scalars  # cosines and sines are kept once for all layers
    found = layer_bytes(SETTINGS, num_query_groups=groups)
    assert found == expected
    assert found < 0.6 * layer_bytes(None, num_query_groups=groups)


def test_values_do_not_keep_queries_and_keys_alive(device):
    """The BF16 model built here saves q, k, v once; Megatron's own self-attention would hold q and k through v."""
    from megatron.core.transformer.attention import SelfAttention

    model, batch = tiny_gpt(), tiny_batch(0, device)
    with _Saved(model) as ours:
        tiny_loss(model, batch)
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = SelfAttention
    with _Saved(model) as plain:
        tiny_loss(model, batch)
    layers, tokens = 2, BATCH * SEQ
    assert plain.bytes - ours.bytes == layers * tokens * 2 * (HIDDEN + HIDDEN)


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
    with pytest.raises(ValueError, match=rf"bf16_layers: got {index}, accepted: -2 to 1 for 2 layers"):
        patch_model(tiny_gpt(), ActivationConfig(bf16_layers=(index,)))


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


def test_exception_inside_patched_restores_the_model():
    model = tiny_gpt()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(KeyError), patched(model, SETTINGS):
        raise KeyError
    assert [type(m) for m in model.modules()] == classes


def test_tp_invariant_replaces_the_output_layer_and_every_norm(device):
    model, batch = tiny_gpt(qk_layernorm=True), tiny_batch(0, device)
    classes = [type(m) for m in model.modules()]
    loss, grads = gradients(model, batch)
    with patched(model, ActivationConfig(tp_invariant=True)) as report:
        assert report.patched == [*BLOCKS, "output_layer"]
        assert all(
            m.exact for m in model.modules() if type(m).__name__.endswith("Norm") and "Folded" not in type(m).__name__
        )
        invariant, invariant_grads = gradients(model, batch)
    assert invariant == pytest.approx(loss, rel=5e-3)
    for n, g in grads.items():
        assert F.cosine_similarity(g.flatten().double(), invariant_grads[n].flatten().double(), dim=0) > 0.97, n
    assert [type(m) for m in model.modules()] == classes


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


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    ],
    ids=["uniform", "block", "core_attn", "mlp", "all"],
)
def test_recompute_changes_nothing(recompute, device):
    batch = tiny_batch(2, device)
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    loss, grads = gradients(model, batch)
    model = tiny_gpt(**recompute)
    report = patch_model(model, SETTINGS)
    flags = "layernorm" in recompute.get("recompute_modules", [])
    assert bool(report.notes) == flags and ("'layernorm' is off" in str(report)) == flags
    recomputed_loss, recomputed = gradients(model, batch)
    assert recomputed_loss == loss
    if device == "cpu":
        assert all(torch.equal(recomputed[n], g) for n, g in grads.items())
    unpatch_model(model)
    for layer in model.decoder.layers:
        assert layer.recompute_input_layernorm == layer.recompute_pre_mlp_layernorm == flags


def test_frozen_weights_get_no_gradient_and_change_nothing_else(device):
    model, batch = tiny_gpt(), tiny_batch(0, device)
    patch_model(model, SETTINGS)
    _, grads = gradients(model, batch)
    frozen = [n for n, p in model.named_parameters() if "linear_fc1" in n or "layers.0.input_layernorm" in n]
    for n, p in model.named_parameters():
        p.requires_grad_(n not in frozen)
    model.zero_grad(set_to_none=True)
    tiny_loss(model, batch).backward()
    for n, p in model.named_parameters():
        assert (p.grad is None) == (n in frozen), n
        assert p.grad is None or device != "cpu" or torch.equal(p.grad, grads[n]), n


def test_gradients_accumulate_over_micro_batches(device):
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    _, first = gradients(model, tiny_batch(0, device))
    _, second = gradients(model, tiny_batch(1, device))
    model.zero_grad(set_to_none=True)
    for seed in (0, 1):
        tiny_loss(model, tiny_batch(seed, device)).backward()
    for n, p in model.named_parameters():
        if device == "cpu":
            assert torch.equal(p.grad, first[n] + second[n]), n


TANH = functools.partial(F.gelu, approximate="tanh")


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


def test_arguments_that_a_patched_module_cannot_honour(device):
    model = tiny_gpt()
    patch_model(model, SETTINGS)
    layer, x = model.decoder.layers[0], torch.zeros(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="per_token_scale"):
        layer.mlp(x, per_token_scale=x[..., 0])
    with pytest.raises(ValueError, match="runtime_gather_output"):
        layer.self_attention.linear_qkv(x, runtime_gather_output=True)
    assert torch.equal(layer.mlp(x, padding_mask=None)[0], layer.mlp(x)[0])


def test_report_condenses_layers_and_groups_by_reason():
    report = PatchReport(
        patched=[f"decoder.layers.{i}.mlp" for i in (0, 1, 2, 4)] + ["output_layer"],
        left={"decoder.layers.3.mlp": "why", "decoder.layers.10.self_attention": "why", "x": "other"},
        notes=["a note"],
    )
    assert str(report).splitlines() == [
        "FP8 flow: 5 of 8 blocks patched",
        "  patched  decoder.layers.[0-2,4].mlp",
        "  patched  output_layer",
        "  left     decoder.layers.[3].mlp: why",
        "  left     decoder.layers.[10].self_attention: why",
        "  left     x: other",
        "  note     a note",
    ]
