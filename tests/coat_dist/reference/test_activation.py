"""Gated activations: values and gradients against torch's, and the passes against their parts."""

import pytest
import torch
import torch.nn.functional as F

from coat_dist.formats import E4M3, E5M2
from coat_dist.reference.activation import (
    ACTIVATIONS,
    activation_apply,
    activation_backward,
    activation_compress,
    activation_grad_amax,
    activation_quantize,
    check_activation,
)
from coat_dist.reference.quantize import amax, dequantize, quantize_groups, tensor_scale

TORCH = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda g: F.gelu(g, approximate="tanh")}


def u8(q):
    return q.codes.view(torch.uint8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_slopes(name):
    gate = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])
    value, slope = ACTIVATIONS[name](gate)
    leaf = gate.double().requires_grad_()
    expected = TORCH[name](leaf)
    (expected_slope,) = torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(value, expected.detach().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, expected_slope.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("f", [1, 32, 45])
def test_passes_are_the_sum_of_their_parts(name, f):
    gate_up, da = torch.randn(6, 2 * f) * 3, torch.randn(6, f)
    gate, up = gate_up.chunk(2, -1)
    g8, up8 = (dequantize(quantize_groups(t, E4M3, 32, "e8m0")) for t in (gate, up))
    exact = activation_compress(gate_up, name, E4M3, 32, "e8m0", exact=True)
    rough = activation_compress(gate_up, name, E4M3, 32, "e8m0", exact=False)
    assert torch.equal(dequantize(exact.gate_up8), torch.stack([g8, up8], -2))  # no group spans gate and up
    assert torch.equal(u8(exact.gate_up8), u8(rough.gate_up8))
    torch.testing.assert_close(exact.amax, (TORCH[name](gate) * up).abs().max())
    torch.testing.assert_close(rough.amax, (TORCH[name](g8) * up8).abs().max())

    scale = tensor_scale(rough.amax, E4M3)
    a8 = activation_quantize(rough.gate_up8, name, E4M3, scale)
    assert torch.equal(a8.codes.float().abs().max(), torch.tensor(E4M3.max))

    leaves = [g8.double().requires_grad_(), up8.double().requires_grad_()]
    grads = torch.autograd.grad(TORCH[name](leaves[0]) * leaves[1], leaves, da.double())
    expected = torch.cat(grads, -1).float()
    largest = activation_grad_amax(da, rough.gate_up8, name)
    torch.testing.assert_close(largest, amax(expected), rtol=1e-5, atol=1e-6)
    grad_scale = tensor_scale(largest, E5M2)
    out = activation_backward(da, rough.gate_up8, name, E5M2, grad_scale, E4M3, scale)
    assert out.d8.codes.dtype == torch.float8_e5m2 and out.a8_t.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(u8(out.d8_t), u8(out.d8).t()) and out.d8_t.codes.is_contiguous()
    assert torch.equal(u8(out.a8_t), u8(a8).t()) and out.a8_t.codes.is_contiguous()
    error = (dequantize(out.d8) - expected).abs()
    # 1e-5: gelu of very negative gates cancels in fp32, here as in torch
    assert (error <= expected.abs() * 0.126 + grad_scale * E5M2.smallest + 1e-5).all()


def test_nan_is_not_lost():
    gate_up = torch.randn(2, 16)
    gate_up[0, 3] = torch.nan
    found = activation_compress(gate_up, "swiglu", E4M3, 32, "e8m0", exact=True)
    assert found.amax == torch.inf
    assert activation_apply(found.gate_up8, "swiglu")[0].isnan().all()


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation: got 'relu', accepted: 'swiglu', 'geglu', 'geglu_tanh'"):
        check_activation("relu")
