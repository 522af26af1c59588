"""What training programs do around patched models (recompute, evaluation, offloading ...) changes no bit on the CPU."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model

from .interplay import FULL, MODELS, assert_same, losses_and_gradients
from .tiny import OLMO2, tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()


@pytest.fixture(params=[*MODELS, "olmo2"])
def options(request):
    return OLMO2 if request.param == "olmo2" else MODELS[request.param]


SELECTIVE = "mlp", "moe", "core_attn", "layernorm"


def build(options, **changes):
    model = tiny_gpt(**options | changes)
    patch_model(model, SETTINGS)
    return model


@pytest.mark.parametrize(
    "recompute",
    [FULL, FULL | {"recompute_num_layers": 2}]
    + [
        {"recompute_granularity": "selective", "recompute_modules": m}
        for m in (["mlp"], ["moe"], ["core_attn"], ["layernorm"])
    ],
    ids=["full", "full_by_two", "mlp", "moe", "core_attn", "layernorm"],
)
def test_recompute(options, recompute, device):
    if "moe" in recompute.get("recompute_modules", ()) and "num_moe_experts" not in options:
        pytest.skip("no experts")
    batch = tiny_batch(2, device)
    assert_same(
        losses_and_gradients(build(options, **recompute), batch), losses_and_gradients(build(options), batch), device
    )


def test_evaluation(options, device):
    model, batch = build(options), tiny_batch(3, device)
    training = tiny_loss(model, batch).item()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert tiny_loss(model, batch).item() == training
    model.train()
    assert tiny_loss(model, batch).item() == training


def test_gradients_accumulate(options, device):
    model, batches = build(options), [tiny_batch(i, device) for i in range(2)]
    _, first = losses_and_gradients(model, batches[0])
    _, second = losses_and_gradients(model, batches[1])
    _, both = losses_and_gradients(model, *batches)
    if device == "cpu":
        for name, gradient in both.items():
            assert torch.equal(gradient, first[name] + second[name]), name


@pytest.mark.parametrize("frozen", ["linear_fc1", "bias", "layers.0.", "norm", "router"])
def test_frozen_parameters(options, frozen, device):
    """Frozen parameters get no gradient, all others the same one as without freezing."""
    model, batch = build(options), tiny_batch(0, device)
    _, whole = losses_and_gradients(model, batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    _, rest = losses_and_gradients(model, batch)
    for name, gradient in rest.items():
        assert (gradient is None) == (frozen in name), name
        assert gradient is None or device != "cpu" or torch.equal(gradient, whole[name]), name


def test_layers_left_in_bf16_compute_what_they_did(options, device):
    model, batch = tiny_gpt(**options), tiny_batch(0, device)
    outputs = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *args: outputs.append(args[-1][0].detach().clone()))
    tiny_loss(model, batch)
    patch_model(model, ActivationConfig(bf16_layers=(0,)))
    tiny_loss(model, batch)
    unpatch_model(model)
    before, after = outputs[:2], outputs[2:]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_saved_tensors_on_the_cpu(options, device):
    """torch.autograd.graph.save_on_cpu: offload of everything that is saved, FP8 codes and scales among it."""
    model, batch = build(options), tiny_batch(0, device)
    expected = losses_and_gradients(model, batch)
    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.save_on_cpu():
        loss = tiny_loss(model, batch)
    loss.backward()
    assert_same(([loss.item()], {n: p.grad for n, p in model.named_parameters()}), expected, device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "aot_eager"), *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in ("gpt2", "experts"))],
)
def test_compiled_layers(name, backend, device):
    """torch.compile around each layer. It may break the graph at the flow; results are those without it."""
    torch._dynamo.reset()
    model, batch = build(MODELS[name]), tiny_batch(0, device)
    expected = losses_and_gradients(model, batch)
    for i, layer in enumerate(model.decoder.layers):
        model.decoder.layers[i] = torch.compile(layer, backend=backend)
    losses, compiled = losses_and_gradients(model, batch)
    torch._dynamo.reset()
    assert_same((losses, {n.replace("._orig_mod", ""): g for n, g in compiled.items()}), expected, device)


@pytest.mark.slow
def test_compiled_experts(device):
    """torch.compile around the experts of a layer alone."""
    torch._dynamo.reset()
    model, batch = build(MODELS["experts"], num_layers=1), tiny_batch(0, device)
    expected = losses_and_gradients(model, batch)
    layer = model.decoder.layers[0]
    layer.mlp = torch.compile(layer.mlp, backend="eager")
    losses, compiled = losses_and_gradients(model, batch)
    torch._dynamo.reset()
    assert_same((losses, {n.replace("_orig_mod.", ""): g for n, g in compiled.items()}), expected, device)
