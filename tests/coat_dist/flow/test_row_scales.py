"""Row-wise scales in forward: its products are the definition's to the bit, and backward does
not notice them.
"""

import pytest
import torch

from coat_dist.flow import Norm, linear, norm_linear
from coat_dist.flow.core import input_product
from coat_dist.flow.core.products import row_operand, saved_format, share_rows
from coat_dist.flow.parallel.overlap import rows_of
from coat_dist.formats import E4M3, FORMATS, QuantizedTensor
from coat_dist.reference.activation import ACTIVATIONS, activation_apply
from coat_dist.reference.gemm import scaled_mm
from coat_dist.reference.norm import norm_apply, norm_stats
from coat_dist.reference.quantize import SMALLEST_SCALE, dequantize, quantize_groups, quantize_rows
from tests.support import equal

from .catalogue import catalogue
from .common import EPS, ONE, Layer, settings

FORMS = [("e4m3", "e8m0"), ("e4m3", "bf16"), ("e5m2", "e8m0")]
DTYPES = [torch.float32, torch.bfloat16]


def tokens(*shape, dtype=torch.float32):
    """Random rows whose sizes differ by orders of magnitude."""
    return (torch.randn(shape) * torch.exp2(torch.randint(-8, 8, (*shape[:-1], 1)).float())).to(
        dtype
    )


def uneven(layer):
    """A layer in whose weights some output features are so small that one scale for all makes them
    subnormal. All else has the same values with scales of rows and of tensors, as they are powers
    of two.
    """
    with torch.no_grad():
        for t in (layer.weight, layer.bias, layer.back, layer.fc1, layer.fc2):
            t[::3] *= 2.0**-40
    return layer


def product(a, b, fmt, dtype):
    """The definition: ``a @ b.T`` of operands in row-wise FP8."""
    return scaled_mm(
        quantize_rows(a, fmt, aligned=True), quantize_rows(b, fmt, aligned=True), dtype
    )


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize(("name", "scale"), FORMS)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_scales_forward_is_the_definition_to_the_bit(forward, name, scale, kind, dtype):
    config, fmt = (
        settings(forward=forward, format=name, scale=scale, forward_scales="row"),
        FORMATS[name],
    )
    saved, before_activation = saved_format(config), saved_format(config, pre_activation=True)
    layer, x = Layer.random(kind=kind, dtype=dtype, f=80, biased=True), tokens(33, 64, dtype=dtype)

    stats = norm_stats(x, kind, EPS)
    source = x
    if forward == "quantized":  # x8 has no mean any more, so that it is normalized as by an RMSNorm
        source = quantize_groups(x if stats.mean is None else x - stats.mean, saved, 32, scale)
        stats = norm_stats(dequantize(source), "rmsnorm", EPS)
    y = norm_apply(source, stats, layer.norm_weight, layer.norm_bias)
    got = norm_linear(x, layer.norm, layer.weight, None, ONE, config)
    assert got.dtype == dtype and torch.equal(got, product(y, layer.weight, fmt, dtype))

    z = tokens(33, 48, dtype=dtype)
    assert torch.equal(linear(z, layer.back, ONE, config), product(z, layer.back, fmt, dtype))

    def rest(pre):
        pre8 = quantize_groups(
            (pre.float() + layer.fc1_bias.float()).unflatten(-1, (2, -1)),
            before_activation,
            32,
            scale,
        )
        a = (
            activation_apply(pre, "swiglu", layer.fc1_bias)
            if forward == "exact"
            else activation_apply(pre8, "swiglu")
        )
        return product(a, layer.fc2, fmt, dtype)

    assert torch.equal(layer.norm_mlp(x, config), rest(product(y, layer.fc1, fmt, dtype)))
    assert torch.equal(layer.mlp(x, config), rest(product(x, layer.fc1, fmt, dtype)))


def gradients(out, leaves):
    weighting = torch.sin(torch.arange(out.numel())).view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, leaves, weighting)


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize(("name", "scale"), FORMS)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_with_row_scales_has_gradients_of_per_tensor_scales(
    forward, name, scale, kind, dtype
):
    layer = uneven(Layer.random(kind=kind, dtype=dtype))
    x = tokens(11, 3, 64, dtype=dtype).requires_grad_()
    z = tokens(11, 3, 48, dtype=dtype).requires_grad_()
    normed = [
        t
        for t in (x, layer.norm_weight, layer.norm_bias, layer.weight, layer.bias)
        if t is not None
    ]
    runs = []
    for scales in ("tensor", "row"):
        config = settings(forward=forward, format=name, scale=scale, forward_scales=scales)
        y = norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config)
        o = linear(z, layer.back, ONE, config)
        runs.append((y, o, gradients(y, normed) + gradients(o, [z, layer.back])))
    assert not torch.equal(runs[0][0], runs[1][0]) and not torch.equal(runs[0][1], runs[1][1])
    assert equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normed", [True, False])
def test_mlp_with_row_scales_has_gradients_of_per_tensor_scales(
    monkeypatch, forward, activation, normed
):
    original, held = input_product.gemm, []

    def gemm(*args, **kwargs):
        """The first product, fc1's, has the same result in both runs."""
        out = original(*args, **kwargs)
        held.append(out.clone())
        return held[0] if kwargs.get("fast_accum") else out

    monkeypatch.setattr(input_product, "gemm", gemm)
    layer = uneven(Layer.random(activation=activation, biased=True, f=80, dtype=torch.bfloat16))
    x = tokens(33, 64, dtype=torch.bfloat16).requires_grad_()
    leaves = [x, layer.fc1, layer.fc1_bias, layer.fc2, *([layer.norm_weight] if normed else [])]
    outs, grads = [], []
    for scales in ("tensor", "row"):
        config = settings(forward=forward, forward_scales=scales)
        outs.append((layer.norm_mlp if normed else layer.mlp)(x, config, activation))
        grads.append(gradients(outs[-1], leaves))
    assert not torch.equal(*outs)
    # Codes of a plain x are rounded twice with row scales: what is subnormal may differ.
    bound = 0 if normed else 1e-3
    for wanted, got in zip(*grads, strict=True):
        assert (got - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("name", ["linear", "norm_linear", "norm_mlp", "mlp"])
def test_row_scales_of_a_token_beside_wild_ones(name):
    """Forward's bits of a token do not depend on what else is in the batch, be it large or not a
    number. Gradients of weights sum over tokens: there NaN must not get lost with its scale.
    """
    layer = Layer.random()
    call = catalogue(layer, forward_scales="row")[name]
    x = torch.randn(20, 64)
    wild = x.clone()
    wild[3] *= 1e4
    wild[7, 5], wild[9, 0] = torch.nan, torch.inf
    rest = [i for i in range(20) if i not in (3, 7, 9)]
    (calm,), (stormy,) = call(x), call(wild)
    assert torch.equal(calm[rest], stormy[rest])
    assert stormy[[7, 9]].isnan().all() and stormy[3].isfinite().all()
    matrices = [p for p in layer.parameters().values() if p.dim() == 2]
    found = torch.autograd.grad(stormy.sum(), matrices, allow_unused=True)
    grads = [grad for grad in found if grad is not None]
    assert grads and all(grad.isnan().all() for grad in grads)


def test_row_operand_finds_the_largest_scale_of_its_rows():
    """Where the pass that wrote the scales found their largest, nothing looks for it again; other
    rows, and the same rows with other scales, come without it.
    """
    config = settings(forward_scales="row")
    x = tokens(9, 64)
    q = quantize_rows(x, E4M3, aligned=True)
    assert row_operand(q, ONE, config).scale is q.top
    alone = QuantizedTensor(q.codes, q.scales, "row")
    assert torch.equal(row_operand(alone, ONE, config).scale, q.top)
    first = int(q.scales.argmax() == 0)  # a part without the largest
    q.top.fill_(torch.inf)  # whoever took it for other rows would show
    for other in (rows_of(q, first, 1), share_rows(q, lambda: x, ONE, settings(tp_invariant=True))):
        assert other.top is None and torch.equal(
            row_operand(other, ONE, config).scale, other.scales.amax()
        )
    x[3, 5] = torch.nan
    assert row_operand(quantize_rows(x, E4M3), ONE, config).scale.isnan()
    assert row_operand(quantize_rows(x[:0], E4M3), ONE, config).scale == SMALLEST_SCALE


def test_norm_linear_without_parameters_of_the_norm():
    x, w = tokens(9, 64), torch.randn(48, 64)
    for kind in ("rmsnorm", "layernorm"):
        got = norm_linear(x, Norm(kind, EPS), w, None, ONE, settings(forward_scales="row"))
        y = norm_apply(x, norm_stats(x, kind, EPS), None, None)
        assert torch.equal(got, product(y, w, FORMATS["e4m3"], torch.float32))
