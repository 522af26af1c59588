"""Activations: the definition against torch, and the passes of forward against their parts. The
whole of both directions is compared with torch in ``tests/coat_dist/flow/test_gradients.py``.
"""

import pytest
import torch

from coat_dist.formats import E4M3
from coat_dist.reference.activation import (
    ACTIVATIONS,
    FUNCTIONS,
    activation_apply,
    activation_backward,
    activation_compress,
    activation_grad_amax,
    activation_quantize,
)
from coat_dist.reference.quantize import (
    dequantize,
    quantize_groups,
    quantize_tensor,
    tensor_scale,
)
from tests.support.activations import TORCH, joined, split, torch_activation


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
    pre = torch.randn(6, parts * f) * 6  # beyond limits, too
    pre[0] = min(ACTIVATIONS[name].limit, 20.0)  # gradients pass at a limit
    bias = torch.randn(parts * f) if biased else None
    plain = split(pre + bias if biased else pre, name)
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
        assert a8.codes.float().abs().max() == E4M3.max
    wanted = quantize_tensor(activation_apply(joined(plain, name), name), E4M3, scale)
    assert torch.equal(u8(activation_quantize(pre, name, E4M3, scale, False, bias)), u8(wanted))

    leaves, da = [t.double().requires_grad_() for t in rounded], torch.randn(6, f)
    grads = torch.autograd.grad(torch_activation(name, leaves), leaves, da.double())
    wanted = joined(grads, name).float()
    got = activation_grad_amax(da, rough.pre8, name)
    torch.testing.assert_close(got, wanted.abs().max(), rtol=1e-5, atol=1e-6)
    d_scale = tensor_scale(got, E4M3)
    d8 = activation_backward(da, rough.pre8, name, E4M3, d_scale, E4M3, scale).d8
    exact = dequantize(quantize_tensor(wanted, E4M3, d_scale))
    step = d_scale.item() * 2**-9  # a neighbouring code, here and of subnormal ones
    torch.testing.assert_close(dequantize(d8), exact, rtol=0.13, atol=1.01 * step)


def test_activation_compress_of_nan():
    pre = torch.randn(2, 16)
    pre[0, 3] = torch.nan
    found = activation_compress(pre, "swiglu", E4M3, 32, "e8m0", exact=True)
    assert found.amax == torch.inf
    assert activation_apply(found.pre8, "swiglu")[0].isnan().all()
