"""The flow as a citizen of autograd: modes, hooks, checkpointing, odd inputs, bad values, clear
refusals.
"""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_dist.flow import Norm, TensorParallel, linear, norm, norm_linear, norm_mlp, scale_rows
from tests.support import equal

from .catalogue import HEADS, RESIDUAL, catalogue
from .common import EPS, ONE, Layer, gradients, settings

ANY_SHAPE = "norm", "norm_linear", "linear", "norm_mlp", "mlp", "scale_rows", "invariant_linear"
ANY_SHAPE += "vocab_parallel_cross_entropy", "linear_cross_entropy", "whole"


def calls(**changes):
    """{name: x → one tensor} of all functions, those with a residual connection, and a layer."""
    layer, config = Layer.random(n=HEADS.width), settings(**changes)
    functions, residual = catalogue(layer, **changes), catalogue(layer, residual=True, **changes)
    functions |= {f"{name} with residual": residual[name] for name in RESIDUAL}
    ungated = Layer.random(activation="gelu", biased=True)
    return {
        **{name: lambda x, f=f: together(f(x)) for name, f in functions.items()},
        "biased_gelu": lambda x: ungated.norm_mlp(x, config, "gelu"),
        "whole": lambda x: layer.flow(x, config),
    }


def together(outs):
    return outs[0] if len(outs) == 1 else torch.cat([t.flatten(2) for t in outs], -1)


@pytest.fixture(
    params=[*((name, "tensor") for name in calls()), ("whole", "row"), ("mlp", "row")], ids="-".join
)
def call(request):
    name, scales = request.param
    return calls(forward_scales=scales)[name]


def run(call, x, weighting=None):
    x = x.detach().requires_grad_()
    out = call(x)
    weighting = torch.ones_like(out) if weighting is None else weighting
    return out, torch.autograd.grad(out, x, weighting, retain_graph=True)[0]


@pytest.mark.parametrize("name", ANY_SHAPE)
def test_functions_of_inputs_of_any_shape(name):
    call, x = calls()[name], torch.randn(6, 4, 64)
    out, grad = run(call, x)
    flat, flat_grad = run(call, x.view(24, 64))
    assert torch.equal(out.flatten(), flat.flatten())
    assert torch.equal(grad.view(24, -1), flat_grad)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("name", [name for name in calls() if name != "sdpa"])
def test_functions_of_inputs_of_any_layout(name, scales):
    call = calls(forward_scales=scales)[name]
    strided = torch.randn(4, 6, 128)[..., ::2].transpose(0, 1)
    assert equal(run(call, strided), run(call, strided.contiguous()))


def test_functions_of_gradients_with_strides_zero_or_transposed(call):
    x = torch.randn(6, 4, 64, requires_grad=True)
    out = call(x)
    expanded = torch.randn(()).expand(out.shape)
    turned = torch.randn_like(out.transpose(0, 1)).transpose(0, 1)
    for weighting in (expanded, turned):
        (a,), (b,) = gradients(out, weighting, [x]), gradients(out, weighting.contiguous(), [x])
        assert torch.equal(a, b)


def test_functions_backward_twice(call):
    x = torch.randn(6, 4, 64, requires_grad=True)
    out = call(x)
    weighting = torch.randn_like(out)
    first, other, again = (
        gradients(out, w, [x])[0] for w in (weighting, torch.randn_like(out), weighting)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    out.backward(weighting)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(weighting)


def test_functions_in_inference_mode(call):
    x = torch.randn(6, 4, 64)
    out = run(call, x)[0]
    with torch.no_grad():
        quiet = call(x)
    assert torch.equal(out, quiet) and not quiet.requires_grad
    with torch.inference_mode():
        assert torch.equal(out, call(x))


def test_functions_under_checkpointing_and_saved_tensor_hooks(call):
    x = torch.randn(6, 4, 64)
    out, grad = run(call, x)
    assert equal(run(lambda t: checkpoint(call, t, use_reentrant=False), x), (out, grad))
    leaf = x.clone().requires_grad_()
    checkpoint(call, leaf, use_reentrant=True).backward(torch.ones_like(out))
    assert torch.equal(leaf.grad, grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        moved = run(call, x)
    assert torch.equal(grad, moved[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("name", ["norm_linear", "linear", "norm_mlp", "biased_gelu", "mlp"])
def test_functions_of_nan_and_infinity(bad, forward, scales, name):
    call = calls(forward=forward, forward_scales=scales)[name]
    x = torch.randn(6, 4, 64)
    x[2, 1, 7] = bad
    assert call(x)[2, 1].isnan().all()
    good = torch.randn(6, 4, 64, requires_grad=True)
    out = call(good)
    weighting = torch.randn_like(out)
    weighting[3, 0, 5] = bad
    (grad,) = gradients(out, weighting, [good])
    assert grad[3, 0].isnan().any()


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_functions_of_zeros_and_extremes(forward, scales):
    layer = Layer.random()
    rows = torch.zeros(4, 1, 64)
    rows[1], rows[2] = 1e-38, 3e4
    rows[3, 0, 9] = 1.0
    x = rows.requires_grad_()
    out = layer.flow(x, settings(forward=forward, forward_scales=scales))
    assert out.isfinite().all()
    for weighting in (
        torch.zeros_like(out),
        torch.full_like(out, 1e-30),
        torch.full_like(out, 1e20),
    ):
        grads = gradients(out, weighting, [x, *layer.parameters().values()])
        assert all(g.isfinite().all() for g in grads)
        if not weighting.any():
            assert not any(g.any() for g in grads)


H = 64
X = torch.randn(2, 3, H)
W = torch.randn(48, H)


def test_functions_refuse_misfits():
    gain, config = torch.ones(H), settings()
    good = Norm("rmsnorm", EPS, gain)
    two = TensorParallel.__new__(TensorParallel)
    two.__dict__.update(group=None, sequence_parallel=False, size=2, rank=0)
    fc2 = torch.randn(H, 24)
    short = Norm("rmsnorm", EPS, torch.ones(1))
    for call, message in [
        (
            lambda: linear(X.half(), W, ONE, config),
            "x: got torch.float16, accepted: torch.bfloat16, torch.float32",
        ),
        (
            lambda: norm_linear(X, good, W, torch.ones(1), ONE, config),
            "bias: got shape [1], accepted: [48]",
        ),
        (lambda: norm_linear(X, short, W, None, ONE, config), "norm.weight: got shape [1]"),
        (
            lambda: norm(X, Norm("layernorm", EPS, gain, torch.ones(3)), ONE),
            "norm.bias: got shape [3], accepted: [64]",
        ),
        (
            lambda: norm(X, Norm("layernorm", EPS, None, gain), ONE),
            "norm.bias: got a bias without a weight",
        ),
        (
            lambda: norm_linear(X, Norm("rmsnorm", EPS, gain, None, True), W, None, two, config),
            "norm.reduce_grad: got true without sequence parallelism",
        ),
        (
            lambda: norm_mlp(X, good, W, torch.randn(H, 48), "swiglu", ONE, config),
            "fc2_weight: got shape [64, 48]",
        ),
        (
            lambda: norm_mlp(X, good, W, fc2, "relu", ONE, config),
            "activation: got 'relu', accepted: 'swiglu'",
        ),
        (
            lambda: norm_mlp(X, good, W, fc2, "swiglu", ONE, config, torch.ones(24)),
            "fc1_bias: got shape [24], accepted: [48]",
        ),
        (lambda: scale_rows(X, torch.ones(2), config), "factor: got shape [2], accepted: [2, 3]"),
        (
            lambda: norm_mlp(X, good, W, fc2, "swiglu", two, settings(tp_invariant=True)),
            "fc2_weight: got 24 input features a rank, accepted with tp_invariant: a multiple of "
            "group_size 32",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
