"""What holds for every function of the flow: autocast changes nothing, and no tokens are a number of tokens."""

import pytest
import torch

from .catalogue import HEADS, NAMES, H, catalogue
from .common import Layer

CASES = [
    ({}, torch.float32),
    ({"forward": "quantized", "forward_scales": "tensor"}, torch.bfloat16),
    ({"tp_invariant": True}, torch.float32),
]


def layer_for(name, dtype=torch.float32):
    return Layer.random(h=H, n=HEADS.width if "qkv" in name else 48, kind="layernorm", dtype=dtype)


def run(call, layer, x, around=None):
    """Outputs and gradients; ``around``: where forward runs, "both" for backward too."""
    leaves = [x, *layer.parameters().values()]
    amp = torch.autocast("cpu", torch.bfloat16)
    with amp if around else torch.enable_grad():
        outs = call(x)
    weightings = [torch.sin(torch.arange(t.numel())).view(t.shape).to(t.dtype) for t in outs]
    with amp if around == "both" else torch.enable_grad():
        return outs, torch.autograd.grad(outs, leaves, weightings, allow_unused=True)


@pytest.mark.parametrize(("changes", "dtype"), CASES)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "sdpa"])
def test_autocast_does_not_reach_inside(name, dtype, changes):
    layer, x = layer_for(name, dtype), torch.randn(6, 2, H, dtype=dtype, requires_grad=True)
    call = catalogue(layer, **changes)[name]
    outs, grads = run(call, layer, x)
    for around in ("forward", "both"):
        others, other_grads = run(call, layer, x, around)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(outs, others, strict=True))
        for a, b in zip(grads, other_grads, strict=True):
            assert (a is None) == (b is None) and (a is None or a.dtype == b.dtype and torch.equal(a, b))


def test_sdpa_is_pytorchs_under_autocast():
    x = torch.randn(6, 2, H, requires_grad=True)
    out, grads = run(catalogue(layer_for("sdpa"))["sdpa"], Layer.random(), x, "forward")
    assert out[0].dtype == torch.bfloat16 and grads[0].dtype == torch.float32


@pytest.mark.parametrize(("changes", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(0, 2), (5, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name, shape, dtype, changes):
    layer, x = layer_for(name, dtype), torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    some = torch.randn(4, 2, H, dtype=dtype, requires_grad=True)
    call = catalogue(layer, **changes)[name]
    outs, grads = run(call, layer, x)
    expected, expected_grads = run(call, layer, some)
    for got, wanted in zip(outs, expected, strict=True):
        assert got.shape == (*shape, *wanted.shape[2:]) and got.dtype == wanted.dtype
    assert grads[0].shape == x.shape
    for got, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or got.shape == wanted.shape and got.dtype == wanted.dtype and not got.any()
