"""What is kept for backward: counted to the byte, and read back as the bytes that forward used."""

import importlib

import pytest
import torch

from coat_dist.flow import linear, norm, norm_linear, norm_mlp, scale_rows
from coat_dist.formats import FORMATS, QuantizedTensor
from coat_dist.reference.activation import activation_apply
from coat_dist.reference.norm import NormStats, norm_apply
from coat_dist.reference.quantize import amax, quantize_rows, quantize_tensor, tensor_scale

from .common import ONE, Layer, settings
from .saved_bytes import normed_bytes, pre_bytes, saved, scale_bytes


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("scale", ["e8m0", "bf16"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("h", "f", "group_size"), [(64, 96, 32), (80, 72, 64)])
def test_layer_saved_bytes_are_the_plan(forward, scales, scale, kind, h, f, group_size):
    config = settings(forward=forward, forward_scales=scales, scale=scale, group_size=group_size)
    layer = Layer.random(h=h, f=f, kind=kind, dtype=torch.bfloat16)
    x = torch.randn(10, 3, h, dtype=torch.bfloat16, requires_grad=True)
    parameters, tokens = layer.parameters().values(), 30
    kept = saved(lambda: norm_linear(x, layer.norm, layer.weight, None, ONE, config), *parameters)
    # Scales of y8 and of the weight.
    assert sum(kept.values()) == tokens * normed_bytes(h, config) + 2 * 4
    kept = saved(
        lambda: norm_mlp(x, layer.norm, layer.fc1, layer.fc2, "swiglu", ONE, config), *parameters
    )
    assert sum(kept.values()) == tokens * (normed_bytes(h, config) + pre_bytes(f, config)) + 4 * 4

    layer = Layer.random(h=h, f=f, kind=kind, dtype=torch.bfloat16, activation="gelu", biased=True)
    parameters = layer.parameters().values()
    # Half of a gated one's; a bias costs nothing.
    kept = saved(lambda: layer.norm_mlp(x, config, "gelu"), *parameters)
    assert (
        sum(kept.values()) == tokens * (normed_bytes(h, config) + pre_bytes(f, config, 1)) + 4 * 4
    )
    kept = saved(lambda: layer.mlp(x, config, "gelu"), *parameters)
    assert sum(kept.values()) == tokens * (h + pre_bytes(f, config, 1)) + 4 * 4
    factor = torch.rand(10, 3, requires_grad=True)
    kept = saved(lambda: scale_rows(x, factor, config), factor)
    assert sum(kept.values()) == tokens * (h + scale_bytes(h, config))


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_linear_saves_its_input_alone(scales):
    layer, config = Layer.random(dtype=torch.bfloat16), settings(forward_scales=scales)
    x = torch.randn(10, 3, 48, dtype=torch.bfloat16, requires_grad=True)
    assert sum(saved(lambda: linear(x, layer.back, ONE, config), layer.back, x).values()) == 2 * 4
    whole = torch.randn(10, 3, 96, dtype=torch.bfloat16, requires_grad=True)
    part = whole[..., :48]  # not contiguous: still no copy
    assert (
        sum(saved(lambda: linear(part, layer.back, ONE, config), layer.back, whole).values())
        == 2 * 4
    )


def test_norm_saves_its_input_and_one_number_a_row():
    layer = Layer.random()
    x = torch.randn(10, 3, 64, requires_grad=True)
    assert sum(saved(lambda: norm(x, layer.norm, ONE), x, layer.norm_weight).values()) == 30 * 4


@pytest.fixture
def products(monkeypatch):
    """Operands of every FP8 product, in the order in which they ran."""
    seen = []
    for name in ("blocks.linear", "blocks.mlp", "core.weights"):
        module = importlib.import_module(f"coat_dist.flow.{name}")
        for function in ("gemm", "summed_gemm"):
            if hasattr(module, function):
                original = getattr(module, function)
                monkeypatch.setattr(
                    module,
                    function,
                    lambda a, b, *rest, _f=original, **named: (
                        seen.append(
                            (a.codes.clone(), a.scales.clone(), b.codes.clone(), b.scales.clone())
                        ),
                        _f(a, b, *rest, **named),
                    )[1],
                )
    return seen


def same_operand(codes, scale, codes_t, scale_t):
    return torch.equal(codes.view(torch.uint8), codes_t.view(torch.uint8).t()) and torch.equal(
        scale, scale_t
    )


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["e8m0", "bf16"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("forward", ["quantized", "exact"])
def test_backward_multiplies_the_bytes_of_forward(products, fmt, scale, kind, forward):
    config = settings(forward=forward, forward_scales="tensor", format=fmt, scale=scale)
    layer, x = Layer.random(kind=kind, f=80), torch.randn(24, 4, 64, requires_grad=True)

    norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config).sum().backward()
    (y8, ys, w8, ws), (_, _, w8_t, ws_t), (_, _, y8_t, ys_t) = products
    assert same_operand(w8, ws, w8_t, ws_t)
    assert same_operand(y8, ys, y8_t, ys_t) == (forward == "quantized")
    products.clear()

    norm_mlp(x, layer.norm, layer.fc1, layer.fc2, "swiglu", ONE, config).square().sum().backward()
    (y8, ys, w1, s1), (a8, as_, w2, s2), (_, _, w2_t, s2_t), wgrad2, (d8, _, w1_t, s1_t), wgrad1 = (
        products
    )
    assert same_operand(w1, s1, w1_t, s1_t) and same_operand(w2, s2, w2_t, s2_t)
    assert torch.equal(d8.view(torch.uint8), wgrad1[0].view(torch.uint8).t())
    assert same_operand(y8, ys, *wgrad1[2:]) == (forward == "quantized")
    assert same_operand(a8, as_, *wgrad2[2:]) == (forward == "quantized")
    # The scales are forward's in both modes.
    assert torch.equal(ys, wgrad1[3]) and torch.equal(as_, wgrad2[3])
    products.clear()

    layer.mlp(x, config).square().sum().backward()
    (x8, xs, _, _), (a8, as_, _, _), _, wgrad2, _, wgrad1 = products
    assert same_operand(x8, xs, *wgrad1[2:])  # saved as it was multiplied, in both modes
    assert same_operand(a8, as_, *wgrad2[2:]) == (forward == "quantized")
    products.clear()

    layer = Layer.random(kind=kind, f=80, activation="gelu", biased=True)
    layer.norm_mlp(x, config, "gelu").square().sum().backward()
    (y8, ys, _, _), (a8, as_, _, _), _, wgrad2, (d8, _, _, _), wgrad1 = products
    assert torch.equal(d8.view(torch.uint8), wgrad1[0].view(torch.uint8).t())
    assert same_operand(y8, ys, *wgrad1[2:]) == (forward == "quantized")
    assert same_operand(a8, as_, *wgrad2[2:]) == (forward == "quantized")
    products.clear()

    z = torch.randn(24, 4, 48, requires_grad=True)
    linear(z, layer.back, ONE, config).sum().backward()
    (z8, zs, w8, ws), (d8, _, w8_t, ws_t), (d8_t, _, z8_t, zs_t) = products
    assert same_operand(z8, zs, z8_t, zs_t) and same_operand(w8, ws, w8_t, ws_t)
    assert torch.equal(d8.view(torch.uint8), d8_t.view(torch.uint8).t())


def same_codes(got, expected):
    return torch.equal(got[0].view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(
        got[1], expected.scales
    )


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_backward_with_row_scales_quantizes_the_values_of_forward(products, fmt, kind):
    """ "quantized" mode: y and a of both directions are one function of the same bytes. Forward's
    codes are theirs by rows, backward's theirs per tensor, transposed, with the largest of
    forward's scales; so it is with weights.
    """
    config, form = settings(forward="quantized", format=fmt, forward_scales="row"), FORMATS[fmt]
    layer, x = Layer.random(kind=kind, f=80), torch.randn(96, 64, requires_grad=True)

    def check(forward, backward, values):
        rows = quantize_rows(values, form, aligned=True)
        assert same_codes(forward, rows)
        assert same_codes(
            backward, quantize_tensor(values, form, rows.scales.amax(), transpose=True)
        )
        assert torch.equal(backward[1], tensor_scale(amax(values), form, aligned=True))

    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        out = layer.norm_mlp(x, config)
    codes, scales, rstd = held[:3]
    x8 = QuantizedTensor(codes, scales, "group", config.group_size)
    pre8 = next(
        QuantizedTensor(c, s, "group", config.group_size)
        for c, s in zip(held, held[1:], strict=False)
        if c.shape == (96, 2, 80)
    )
    out.square().sum().backward()
    (y8, ys, w1, s1), (a8, as_, w2, s2), (_, _, w2_t, s2_t), wgrad2, (_, _, w1_t, s1_t), wgrad1 = (
        products
    )
    y = norm_apply(x8, NormStats(rstd, None), layer.norm_weight, layer.norm_bias)
    check((y8, ys), wgrad1[2:], y)
    check((a8, as_), wgrad2[2:], activation_apply(pre8, "swiglu"))
    check((w1, s1), (w1_t, s1_t), layer.fc1)
    check((w2, s2), (w2_t, s2_t), layer.fc2)


def test_forward_exact_saturates_in_backward(products):
    """A row that is one large value: E4M3 rounds 1.07 up to 1.125, and y = x * rstd, 0.99999 of
    what forward's scale maps to the largest code, would exceed it.
    """
    layer = Layer.random()
    with torch.no_grad():
        layer.norm_weight[5] = 1.75  # y is 448 / 256 * 8
    x = torch.full((4, 1, 64), 0.01)
    x[:, :, 5] = 1.07
    x.requires_grad_()
    out = norm_linear(
        x, layer.norm, layer.weight, None, ONE, settings(forward="exact", saved_format="e4m3")
    )
    out.sum().backward()
    wgrad_operand = products[-1][2].float()
    assert wgrad_operand.isfinite().all() and wgrad_operand.abs().max() == 448
    assert all(p.grad.isfinite().all() for p in (x, layer.weight, layer.norm_weight))
