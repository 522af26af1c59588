"""What training programs do around patched models (recompute, evaluation, offloading ...) changes no bit on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model

from .tiny import tiny_batch, tiny_gpt, tiny_loss

SETTINGS = ActivationConfig()
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"normalization": "LayerNorm", "gated_linear_unit": False, "activation_func": F.gelu,
             "add_bias_linear": True, "gpt": {"share_embeddings_and_output_weights": True}},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 64},
}  # fmt: skip


@pytest.fixture(params=MODELS)
def options(request):
    return MODELS[request.param]


def build(options, **changes):
    model = tiny_gpt(**options | changes)
    patch_model(model, SETTINGS)
    return model


def gradients(model, *batches):
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = tiny_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_same(got, expected, device):
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        if gradient is None:
            assert got[1][name] is None, name
        elif device == "cpu":  # a GPU's attention backward is not deterministic
            assert got[1][name] is not None and torch.equal(got[1][name], gradient), name
        else:
            torch.testing.assert_close(got[1][name], gradient, rtol=5e-2, atol=1e-3)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "recompute",
    [FULL, FULL | {"recompute_num_layers": 2}]
    + [{"recompute_granularity": "selective", "recompute_modules": m} for m in (["mlp"], ["moe"], ["core_attn"])],
    ids=["full", "full_by_two", "mlp", "moe", "core_attn"],
)
def test_recompute(options, recompute, device):
    if "moe" in recompute.get("recompute_modules", ()) and "num_moe_experts" not in options:
        pytest.skip("no experts")
    batch = tiny_batch(2, device)
    assert_same(gradients(build(options, **recompute), batch), gradients(build(options), batch), device)


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
    _, first = gradients(model, batches[0])
    _, second = gradients(model, batches[1])
    _, both = gradients(model, *batches)
    if device == "cpu":
        for name, gradient in both.items():
            assert torch.equal(gradient, first[name] + second[name]), name


@pytest.mark.parametrize("frozen", ["linear_fc1", "bias", "layers.0.", "norm", "router"])
def test_frozen_parameters(options, frozen, device):
    """Frozen parameters get no gradient, all others the same one as without freezing."""
    model, batch = build(options), tiny_batch(0, device)
    _, whole = gradients(model, batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    _, rest = gradients(model, batch)
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
    expected = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    with torch.autograd.graph.save_on_cpu():
        loss = tiny_loss(model, batch)
    loss.backward()
    assert_same(([loss.item()], {n: p.grad for n, p in model.named_parameters()}), expected, device)


@pytest.mark.long
@pytest.mark.parametrize(("name", "backend"), [("llama", "aot_eager"), ("gpt2", "eager"), ("experts", "eager")])
def test_compiled_layers(name, backend, device):
    """torch.compile around each layer. It may break the graph at the flow; results are those without it."""
    torch._dynamo.reset()
    model, batch = build(MODELS[name]), tiny_batch(0, device)
    expected = gradients(model, batch)
    for i, layer in enumerate(model.decoder.layers):
        model.decoder.layers[i] = torch.compile(layer, backend=backend)
    losses, compiled = gradients(model, batch)
    torch._dynamo.reset()
    assert_same((losses, {n.replace("._orig_mod", ""): g for n, g in compiled.items()}), expected, device)
