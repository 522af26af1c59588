"""Activations: the definition against torch, the passes against their parts, the kernels against
the definition.
"""

import pytest
import torch

from coat_dist.formats import E4M3, E5M2
from coat_dist.reference.activation import (
    ACTIVATIONS,
    FUNCTIONS,
    activation_apply,
    activation_backward,
    activation_compress,
    activation_compress_rows,
    activation_grad_amax,
    activation_quantize,
)
from coat_dist.reference.quantize import (
    amax,
    dequantize,
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    tensor_scale,
)
from tests.support.activations import TORCH, torch_activation

from .agreement import compare


def u8(q):
    return q.codes.view(torch.uint8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_values_and_slopes(name):
    gate = torch.cat(
        [torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])]
    )
    value, slope = FUNCTIONS[name](gate)
    leaf = gate.double().requires_grad_()
    expected = TORCH[name](leaf)
    (expected_slope,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value, expected.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, expected_slope.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("f", [1, 32, 45])
@pytest.mark.parametrize("biased", [False, True])
def test_activation_passes_are_their_parts(name, f, biased):
    parts = ACTIVATIONS[name].parts
    pre, da = torch.randn(6, parts * f) * 3, torch.randn(6, f)
    bias = torch.randn(parts * f) if biased else None
    plain = (pre + bias if biased else pre).chunk(parts, -1)
    rounded = [dequantize(quantize_groups(t, E4M3, 32, "e8m0")) for t in plain]
    exact = activation_compress(pre, name, E4M3, 32, "e8m0", True, bias)
    rough = activation_compress(pre, name, E4M3, 32, "e8m0", False, bias)
    # No group spans gate and up.
    assert torch.equal(dequantize(exact.pre8), torch.stack(rounded, -2))
    assert torch.equal(u8(exact.pre8), u8(rough.pre8))
    torch.testing.assert_close(exact.amax, torch_activation(name, plain).abs().max())
    torch.testing.assert_close(rough.amax, torch_activation(name, rounded).abs().max())

    scale = tensor_scale(rough.amax, E4M3)
    a8 = activation_quantize(rough.pre8, name, E4M3, scale)
    if rough.amax:
        assert torch.equal(a8.codes.float().abs().max(), torch.tensor(E4M3.max))
    wanted = quantize_tensor(activation_apply(torch.cat(plain, -1), name), E4M3, scale)
    assert torch.equal(u8(activation_quantize(pre, name, E4M3, scale, False, bias)), u8(wanted))

    leaves = [t.double().requires_grad_() for t in rounded]
    grads = torch.autograd.grad(torch_activation(name, leaves), leaves, da.double())
    expected = torch.cat(grads, -1).float()
    largest = activation_grad_amax(da, rough.pre8, name)
    torch.testing.assert_close(largest, amax(expected), rtol=1e-5, atol=1e-6)
    grad_scale = tensor_scale(largest, E5M2)
    bias_sum = torch.float64 if biased else None
    out = activation_backward(da, rough.pre8, name, E5M2, grad_scale, E4M3, scale, bias_sum)
    assert out.d8.codes.dtype == torch.float8_e5m2 and out.a8_t.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(u8(out.d8_t), u8(out.d8).t()) and out.d8_t.codes.is_contiguous()
    assert torch.equal(u8(out.a8_t), u8(a8).t()) and out.a8_t.codes.is_contiguous()
    error = (dequantize(out.d8) - expected).abs()
    # 1e-5: gelu of very negative gates cancels in fp32, here as in torch
    assert (error <= expected.abs() * 0.126 + grad_scale * E5M2.smallest + 1e-5).all()
    assert (out.dbias is None) == (not biased)
    if biased:
        assert out.dbias.dtype == bias_sum
        torch.testing.assert_close(out.dbias, torch.cat(grads, -1).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("f", [1, 45])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_activation_compress_rows_is_two_passes(name, f, exact, biased):
    width = ACTIVATIONS[name].parts * f
    pre = torch.randn(2, 3, width) * torch.exp(torch.randn(2, 3, 1))
    bias = torch.randn(width) if biased else None
    arguments = (pre, name, E4M3, 32, "e8m0", exact, bias)
    got, first = activation_compress_rows(*arguments), activation_compress(*arguments)
    compare(got.pre8, first.pre8)
    a = activation_apply(pre, name, bias) if exact else activation_apply(first.pre8, name)
    compare(got.a8, quantize_rows(a, E4M3, aligned=True))
    assert torch.equal(got.a8.scales.amax(), tensor_scale(first.amax, E4M3, aligned=True))


def test_activation_compress_of_nan():
    pre = torch.randn(2, 16)
    pre[0, 3] = torch.nan
    found = activation_compress(pre, "swiglu", E4M3, 32, "e8m0", exact=True)
    assert found.amax == torch.inf
    assert activation_apply(found.pre8, "swiglu")[0].isnan().all()


def test_activation_apply_refuses_a_second_bias():
    """The FP8 form holds it: a second one is a mistake."""
    pre, bias = torch.randn(2, 16), torch.ones(16)
    pre8 = activation_compress(pre, "gelu", E4M3, 32, "e8m0", True, bias).pre8
    with pytest.raises(ValueError, match="bias: got a tensor with a quantized pre-activation"):
        activation_apply(pre8, "gelu", bias)
