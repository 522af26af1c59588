"""What is kept for backward: counted to the byte, and read back as the bytes that forward used.
With row scales gradients are those of scales per tensor: ``test_row_scales.py``.
"""

import pytest
import torch

from coat_dist.flow import invalidate_weights, linear, norm, norm_linear, scale_rows
from tests.support import equal

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
    ungated = Layer.random(
        h=h, f=f, dtype=torch.bfloat16, kind=kind, activation="gelu", biased=True
    )
    factor = torch.rand(10, 3, requires_grad=True)
    known = [*layer.parameters().values(), *ungated.parameters().values(), factor]
    normed, pre = normed_bytes(h, config), pre_bytes(f, config)
    plain = h + 4 * (scales == "row")
    for call, of_token, scalars in (
        (lambda: norm_linear(x, layer.norm, layer.weight, None, ONE, config), normed, 2),
        (lambda: layer.norm_mlp(x, config), normed + pre, 4),
        # Half of a gated one's; a bias costs nothing.
        (lambda: ungated.norm_mlp(x, config, "gelu"), normed + pre // 2, 4),
        (lambda: ungated.mlp(x, config, "gelu"), plain + pre // 2, 4),
        (lambda: scale_rows(x, factor, config), h + scale_bytes(h, config), 0),
    ):
        assert sum(saved(call, *known).values()) == 30 * of_token + 4 * scalars


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_linear_saves_its_input_alone(scales):
    layer, config = Layer.random(dtype=torch.bfloat16), settings(forward_scales=scales)
    x = torch.randn(10, 3, 48, dtype=torch.bfloat16, requires_grad=True)
    whole = torch.randn(10, 3, 96, dtype=torch.bfloat16, requires_grad=True)
    part = whole[..., :48]  # not contiguous: still no copy
    for given in (x, part):
        kept = saved(lambda t=given: linear(t, layer.back, ONE, config), layer.back, x, whole)
        assert sum(kept.values()) == 2 * 4


class Alias(torch.autograd.Function):
    """What ZeRO-3 gives each module in place of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("given", [lambda x: x, lambda x: Alias.apply(x).view(5, 2, 48)])
@pytest.mark.parametrize("frozen", [False, True])
def test_linears_of_one_tensor_share_its_codes(given, frozen):
    """They are saved once, not at all for frozen weights, and never used for other values."""
    config = settings()
    weights = [torch.randn(32, 48, dtype=torch.bfloat16) for _ in range(2)]
    leaf = torch.randn(10, 48, dtype=torch.bfloat16, requires_grad=True)
    x = leaf * 2
    for w in weights:
        w.requires_grad_(not frozen)

    def outputs(copy=lambda x: x):
        inputs = copy(x), given(copy(x))
        found = []
        for one, w in zip(inputs, weights, strict=True):
            found.append(norm_linear(one, None, w, None, ONE, config).view(10, 32))
        return found

    kept = sum(saved(lambda: sum(outputs()), x, *weights).values())
    assert kept == 10 * (48 + 4) * (not frozen) + 4 * (1 + len(weights))
    leaves = [leaf] if frozen else [leaf, *weights]
    for _ in range(2):
        shared, apart = outputs(), outputs(torch.clone)
        assert equal(shared, apart)
        found = (torch.autograd.grad(sum(o), leaves, shared[0], True) for o in (shared, apart))
        assert equal(*found)
        with torch.no_grad():
            x.mul_(3)


def test_norm_saves_its_input_and_one_number_a_row():
    layer = Layer.random()
    x = torch.randn(10, 3, 64, requires_grad=True)
    assert sum(saved(lambda: norm(x, layer.norm, ONE), x, layer.norm_weight).values()) == 30 * 4


def transposed(operand, wanted):
    """Whether an operand of backward has the codes, transposed, and the scale of another one."""
    return torch.equal(bytes_of(operand), bytes_of(wanted).t()) and torch.equal(
        operand.scales, wanted.scales
    )


def bytes_of(operand):
    return operand.codes.view(torch.uint8)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["e8m0", "bf16"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("forward", ["quantized", "exact"])
def test_backward_multiplies_the_bytes_of_forward(products, fmt, scale, kind, forward):
    config = settings(forward=forward, forward_scales="tensor", format=fmt, scale=scale)
    layer = Layer.random(kind=kind, f=80)
    ungated = Layer.random(kind=kind, f=80, activation="gelu", biased=True)
    x, z = (torch.randn(24, 4, n, requires_grad=True) for n in (64, 48))
    for normed, call in (
        (True, lambda: norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config)),
        (False, lambda: linear(z, layer.back, ONE, config)),
    ):
        products.clear()
        call().sum().backward()
        product, dgrad, wgrad = products
        assert transposed(dgrad.b, product.b)
        assert transposed(wgrad.a, dgrad.a)
        # A linear's input is saved as it was multiplied, in both modes.
        assert transposed(wgrad.b, product.a) == (forward == "quantized" or not normed)
    for normed, call in (
        (True, lambda: layer.norm_mlp(x, config)),
        (False, lambda: layer.mlp(x, config)),
        (True, lambda: ungated.norm_mlp(x, config, "gelu")),
    ):
        products.clear()
        call().square().sum().backward()
        fc1, fc2, dgrad2, wgrad2, dgrad1, wgrad1 = products
        assert transposed(dgrad1.b, fc1.b) and transposed(dgrad2.b, fc2.b)
        assert transposed(wgrad1.a, dgrad1.a)
        assert transposed(wgrad1.b, fc1.a) == (forward == "quantized" or not normed)
        assert transposed(wgrad2.b, fc2.a) == (forward == "quantized")
        # The scales are forward's in both modes.
        assert torch.equal(fc1.a.scales, wgrad1.b.scales)
        assert torch.equal(fc2.a.scales, wgrad2.b.scales)


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
    wgrad_operand = products[-1].b.codes.float()
    assert wgrad_operand.isfinite().all() and wgrad_operand.abs().max() == 448
    assert all(p.grad.isfinite().all() for p in (x, layer.weight, layer.norm_weight))


def test_codes_of_a_parameter_are_not_kept_over_a_step():
    """Optimizers write flat buffers, and parameters, which may be inputs too, are views of them."""
    weight, flat = torch.randn(64, 64), torch.randn(512)
    queries = torch.nn.Parameter(torch.empty(0))
    queries.data = flat.view(8, 64)
    for _ in range(2):
        found = norm_linear(queries, None, weight, None, ONE, settings())
        wanted = queries @ weight.t()
        assert (found - wanted).norm() < 0.1 * wanted.norm()
        flat.normal_()
        invalidate_weights()
