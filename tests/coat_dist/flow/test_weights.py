"""Cached codes of weights: training with them, their bytes and lifetime. Changes:
test_weights_changes.py.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

from coat_dist.flow import invalidate_weights, linear, norm_linear, norm_mlp, weights

from .common import ONE, Layer, plain_linear, settings
from .microbatches import REPLAYS, WEIGHTS, backward, batches, replayed, with_main_grad

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.mark.parametrize("kind", REPLAYS)
def test_main_grad_and_the_cache_under_replays(kind):
    """Saved parameters come back without their attributes there."""
    layer = Layer.random()
    plain, x = layer.copy(), batches(1)[0]
    expected = backward(plain, x, settings())
    for options in (
        {"wgrad": "main_grad"},
        {"weights": "cached"},
        {"wgrad": "main_grad", "weights": "cached"},
    ):
        other = layer.copy()
        if "wgrad" in options:
            with_main_grad(other, torch.float32)
        assert torch.equal(backward(other, x, settings(**options), replayed(kind)), expected)
        for name, p in other.parameters().items():
            got = p.main_grad if name in WEIGHTS and "wgrad" in options else p.grad
            assert torch.equal(got, getattr(plain, name).grad), (name, options)


class Model(torch.nn.Module):
    """Two layers whose parameters a torch module owns."""

    def __init__(self, layers):
        super().__init__()
        self.layers = [layer.copy() for layer in layers]
        for i, layer in enumerate(self.layers):
            for name, t in layer.parameters().items():
                self.register_parameter(f"{name}_{i}", torch.nn.Parameter(t.detach()))
                setattr(layer, name, getattr(self, f"{name}_{i}"))

    def forward(self, x, config, wrap=lambda f, x: f(x)):
        for layer in self.layers:
            x = wrap(lambda t, layer=layer: layer.flow(t, config), x)
        return x


def train(layers, data, mode, kind, scales, accumulation=2):
    """Losses of a loop with everything in it: accumulation, two micro-batches in flight,
    evaluation, loads.
    """
    config, model = settings(weights=mode, forward_scales=scales), Model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    first = {k: v.clone() for k, v in model.state_dict().items()}
    losses, wrap = [], replayed(kind)
    for step in range(len(data) // accumulation):
        window = data[step * accumulation : (step + 1) * accumulation]
        flight = [model(x.clone().requires_grad_(), config, wrap).square().mean() for x in window]
        for loss in flight:
            loss.backward()
            losses.append(loss.item())
        if step % 2:
            with torch.no_grad() if step % 4 == 1 else torch.inference_mode():
                losses.append(model(-window[0], config).square().mean().item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:  # evaluation straight after a step, before any training forward
            with torch.inference_mode():
                losses.append(model(-window[0], config).square().mean().item())
            model.load_state_dict(first)
        if step == 3:
            with torch.no_grad():
                losses.append(model(-window[0], config).square().mean().item())
            for p in model.parameters():
                p.data = p.data * 1.25  # other storage
        if step == 4:
            with torch.no_grad():
                losses.append(model(-window[0], config).square().mean().item())
                for p in model.parameters():
                    p.mul_(0.75)
    return losses


@pytest.mark.parametrize(
    ("kind", "scales"), [*((kind, "tensor") for kind in REPLAYS), ("plain", "row")]
)
def test_cached_training_is_the_same_to_the_bit(kind, scales, quantized):
    layers, data = [Layer.random(f=64), Layer.random(f=64)], batches(14)
    expected = train(layers, data, "on_use", kind, scales)
    quantized.clear()
    assert train(layers, data, "cached", kind, scales) == expected
    assert len(set(expected)) == len(expected)  # nothing stood still
    # Once for each of 7 steps and 3 changes in between.
    assert len(quantized) == 2 * len(WEIGHTS) * (7 + 3)


def test_different_settings_do_not_share_codes():
    p, x = torch.nn.Parameter(torch.randn(64, 48)), torch.randn(20, 48)
    for fmt, scales in (
        ("e4m3", "tensor"),
        ("e5m2", "tensor"),
        ("e5m2", "row"),
        ("e4m3", "row"),
        ("e4m3", "tensor"),
    ):
        options = {"format": fmt, "grad_format": "e4m3", "forward_scales": scales}
        cached = linear(x, p, ONE, settings(weights="cached", **options))
        assert torch.equal(cached, linear(x, p, ONE, settings(**options)))


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_bytes_and_lifetime(scales):
    layer, x = Layer.random(dtype=torch.bfloat16), batches(1, torch.bfloat16)[0]
    config = settings(weights="cached", forward_scales=scales)
    out = layer.flow(x, config)
    elements, rows = (
        sum(count(getattr(layer, name)) for name in WEIGHTS) for count in (torch.numel, len)
    )
    for_rows = 4 * rows if scales == "row" else 0
    kept = [
        t
        for entry in weights._cache.values()
        for t in (entry.operand.q8.codes, entry.operand.q8.scales)
    ]
    kept += [entry.operand.scale for entry in weights._cache.values() if scales == "row"]
    # A byte each, and scales.
    assert sum(t.nbytes for t in kept) == elements + 4 * len(WEIGHTS) + for_rows
    del kept
    copied = copy.deepcopy(layer.weight)
    assert not copied.__dict__ and torch.equal(copied, layer.weight)
    pickle.dump(layer.weight, buffer := io.BytesIO())
    assert len(buffer.getvalue()) < 2 * layer.weight.numel() + 2000
    held = [weakref.ref(entry.operand.q8) for entry in weights._cache.values()]
    invalidate_weights()
    assert not weights._cache
    # Though ``out`` still holds its graph.
    assert len(held) == len(WEIGHTS) and not any(w8() for w8 in held)
    out.sum().backward()  # and can still run
    assert layer.weight.grad.isfinite().all()
    layer.flow(x, config)
    del layer, out, copied
    gc.collect()
    assert not weights._cache


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_backward_after_the_codes_are_gone_is_the_same(scales):
    layer, x = Layer.random(), batches(1)[0]
    grads = []
    for drop in (False, True):
        out = layer.flow(x, settings(weights="cached", forward_scales=scales))
        if drop:
            invalidate_weights()
        grads.append(torch.autograd.grad(out.square().sum(), list(layer.parameters().values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_parameters_of_zero_3_are_refused():
    layer, x = Layer.random(), batches(1)[0]
    layer.weight.ds_id = layer.fc1.ds_id = 7
    for call in (
        lambda: norm_linear(x, layer.norm, layer.weight, None, ONE, settings(weights="cached")),
        lambda: norm_mlp(
            x, layer.norm, layer.fc1, layer.fc2, "swiglu", ONE, settings(weights="cached")
        ),
    ):
        with pytest.raises(
            ValueError, match="activation.weights: got 'cached' with a parameter that ZeRO-3"
        ):
            call()


def test_compiled_code_does_not_keep_codes():
    """What was traced once must quantize the weights of each call."""
    weight, x = torch.nn.Parameter(torch.randn(64, 48)), torch.randn(20, 48)
    compiled = torch.compile(lambda t: plain_linear(weight, 2 * t), backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), plain_linear(weight, 2 * x, "on_use"))
        weight.data.mul_(1.5)
    assert not weights._cache
