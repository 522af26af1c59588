"""What training programs do around patched models (recompute, freezing, offloading ...) changes
no bit on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from coat_dist.config import ActivationConfig
from coat_dist.flow.saved import saved_for_backward
from megatron_patches import patch_model
from tests.support import slow

from .tiny import (
    FAMILIES,
    FULL,
    assert_equal,
    gradients,
    selective,
    tiny_batch,
    tiny_gpt,
    tiny_loss,
)

# Which parameters are trained, by a test on their names.
TRAINED = {
    "not the embedding": lambda n: "embedding" not in n,
    "from the first MLP": lambda n: (
        not any(k in n for k in ("embedding", "0.input_layernorm", "0.self_attention"))
    ),
    "the last layer": lambda n: "layers.1." in n or "final" in n,
    "norms of MLPs": lambda n: "pre_mlp_layernorm" in n,
    "fc1 of the last layer": lambda n: "1.mlp.linear_fc1" in n,
    "fc2 of the last layer": lambda n: "1.mlp.linear_fc2" in n,
    "biases": lambda n: "bias" in n,
    "all but norms": lambda n: "norm" not in n,
    "all but routers": lambda n: "router" not in n,
}
BIASED = {"add_bias_linear": True, "hidden_dropout": 0.1}


def build(options, boundaries="bf16", **changes):
    model = tiny_gpt(**options | changes)
    patch_model(model, ActivationConfig(boundaries=boundaries))
    return model


@pytest.fixture(params=FAMILIES)
def options(request):
    return FAMILIES[request.param]


@pytest.mark.parametrize(
    "recompute",
    [
        FULL,
        FULL | {"recompute_num_layers": 2},
        *map(selective, ("mlp", "moe", "core_attn", "layernorm")),
    ],
)
def test_recompute(options, recompute, device):
    if "moe" in recompute.get("recompute_modules", ()) and "num_moe_experts" not in options:
        pytest.skip("no experts")
    batch = tiny_batch(2, device)
    assert_equal(gradients(build(options, **recompute), batch), gradients(build(options), batch))


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [({}, 2), ({"recompute_num_layers": 2}, 1), ({"recompute_method": "block"}, 1)],
)
def test_full_recompute_keeps_codes(options, recompute, kept, device):
    if "num_moe_experts" in options:
        pytest.skip("inputs of routers are not rounded")
    batch, found = tiny_batch(2, device), []
    for boundaries in ("bf16", "fp8"):
        model = build(options, boundaries, **FULL | recompute)
        with saved_for_backward(model) as held:
            tiny_loss(model, batch)
        found.append((sum(held.values()), gradients(model, batch)[0]))
    (whole, wanted), (codes, loss) = found
    assert loss == wanted
    elements, size = batch[0].numel() * model.config.hidden_size, model.config.params_dtype.itemsize
    assert whole - codes == kept * (elements * size - elements * 33 // 32 - size)


def test_evaluation(options, device):
    model, batch = build(options, hidden_dropout=0, attention_dropout=0), tiny_batch(3, device)
    training = tiny_loss(model, batch).item()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert tiny_loss(model, batch).item() == training
    model.train()
    assert tiny_loss(model, batch).item() == training


def check_frozen(options, recompute, which, device):
    """Frozen parameters get no gradient, all others the same one as without freezing and
    recompute.
    """
    batch, model = tiny_batch(2, device), build(options, **recompute)
    loss, whole = gradients(build(options), batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED[which](name))
    found = gradients(model, batch)
    assert_equal(found, (loss, {n: g if TRAINED[which](n) else None for n, g in whole.items()}))


@pytest.mark.parametrize(
    "which", ["not the embedding", "all but norms", "all but routers", "biases"]
)
def test_frozen_parameters(options, which, device):
    if which == "biases" and "add_bias_linear" not in options:
        pytest.skip("no biases")
    check_frozen(options, {}, which, device)


@pytest.mark.parametrize(
    ("module", "which"),
    [("mlp", which) for which in TRAINED]
    + [(m, "from the first MLP") for m in ("core_attn", "layernorm")],
)
def test_frozen_parameters_under_recompute(module, which, device):
    check_frozen(BIASED, selective(module), which, device)


@pytest.mark.parametrize("module", ["mlp", "core_attn"])
def test_hooks_of_parameters_run_once(module, device):
    """ZeRO and Megatron's DistributedDataParallel count on it."""
    model = build(BIASED, **selective(module))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(TRAINED["from the first MLP"](name))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            parameter.register_hook(lambda gradient: gradient.clone())
            accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulate.register_hook(lambda *_, name=name: seen.append(f"node {name}"))
            parameter.coat_keep = accumulate
    gradients(model, tiny_batch(2, device))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(seen) == sorted(names + [f"node {n}" for n in names])


def test_saved_tensors_on_the_cpu(options, device):
    """torch.autograd.graph.save_on_cpu: offload of everything that is saved, FP8 codes and
    scales among it.
    """
    model, batch = build(options), tiny_batch(0, device)
    expected = gradients(model, batch)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradients(model, batch), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "aot_eager"),
        *(slow(name, "eager") for name in ("gpt2", "experts")),
    ],
)
def test_compiled_layers(name, backend, device, monkeypatch):
    """torch.compile around each layer. It may break the graph at the flow; results are those
    without it.
    """
    torch._dynamo.reset()
    model, batch, waits = build(FAMILIES[name]), tiny_batch(0, device), []
    expected = gradients(model, batch)
    if name == "llama":  # with what waits for gathered parameters
        monkeypatch.setattr(DistributedDataParallel, "__module__", __name__)
        model.decoder.layers[0].mlp.linear_fc2.register_forward_pre_hook(
            lambda module: waits.append(module)
        )
    for i, layer in enumerate(model.decoder.layers):
        model.decoder.layers[i] = torch.compile(layer, backend=backend)
    loss, compiled = gradients(model, batch)
    torch._dynamo.reset()
    assert len(waits) == (name == "llama")
    assert_equal((loss, {n.replace("._orig_mod", ""): g for n, g in compiled.items()}), expected)
