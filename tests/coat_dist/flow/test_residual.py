"""The residual connection's alias: its gradient is added where the norm's is computed, and
nothing else changes.
"""

import importlib

import pytest
import torch

from coat_dist.reference.norm import norm_backward
from tests.support import Adds, equal

from .catalogue import HEADS, RESIDUAL, H, catalogue
from .common import Layer
from .saved_bytes import saved

S, B = 12, 3


def function(name, layer, residual=True, **changes):
    return catalogue(layer, residual, **changes)[name]


def tensors(kind="rmsnorm", dtype=torch.bfloat16):
    layer = Layer.random(h=H, n=HEADS.width, kind=kind, dtype=dtype)
    return layer, torch.randn(S, B, H, dtype=dtype, requires_grad=True)


@pytest.fixture
def backward_arguments(monkeypatch):
    """Arguments of every call of ``norm_backward``."""
    module, seen = importlib.import_module("coat_dist.flow.core.inputs"), []
    original = module.norm_backward
    monkeypatch.setattr(module, "norm_backward", lambda *args: seen.append(args) or original(*args))
    return seen


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_gradient_is_the_sum_rounded_once(name, kind, scales, backward_arguments):
    layer, x = tensors(kind)
    inputs = [x, *(p for p in layer.parameters().values())]
    plain, (*outs, alias) = (
        function(name, layer, r, forward_scales=scales)(x) for r in (False, True)
    )
    assert equal(outs, plain) and torch.equal(alias, x)
    douts, carried = [torch.randn_like(t) for t in outs], torch.randn_like(x) * 3
    _, *expected = torch.autograd.grad(plain, inputs, douts, allow_unused=True)
    dx, *grads = torch.autograd.grad((*outs, alias), inputs, (*douts, carried), allow_unused=True)
    assert [g is None for g in grads] == [g is None for g in expected]
    assert equal(grads, expected)
    unfused, fused = backward_arguments
    assert unfused[-1] is None and torch.equal(fused[-1].view_as(carried), carried)
    in_fp32 = norm_backward(*unfused[:6], torch.float32, unfused[7])[0]
    assert torch.equal(dx, (in_fp32.view_as(x) + carried.float()).bfloat16())


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_leaves_autograd_nothing_to_add(name):
    layer, leaf = tensors()
    counts = []
    for fused in (False, True):
        x, leaf.grad = leaf * 1, None  # gradients meet in the buffer of the product's node
        *outs, last = (*function(name, layer, residual=fused)(x), x)[: None if not fused else -1]
        assert fused == (last.grad_fn is outs[0].grad_fn)
        with Adds(S * B * H) as adds:
            torch.autograd.backward((*outs, last), [torch.ones_like(t) for t in (*outs, last)])
        counts.append(adds.count)
    assert counts == [1, 0]


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_alias_saves_no_bytes(name):
    layer, x = tensors()
    *_, alias = function(name, layer)(x)
    assert alias.data_ptr() == x.data_ptr() and alias._is_view()
    kept = [
        saved(lambda r=r: function(name, layer, residual=r)(x)[0], *layer.parameters().values())
        for r in (0, 1)
    ]
    assert sorted(kept[0].values()) == sorted(kept[1].values()) and x.data_ptr() not in kept[1]


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_without_a_gradient_is_the_input(name):
    layer, x = tensors()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert function(name, layer)(x)[-1] is x
    fixed = x.detach()
    *outs, alias = function(name, layer)(fixed)
    assert alias is fixed and outs[0].requires_grad
    outs[0].sum().backward()
    assert fixed.grad is None and layer.norm_weight.grad.any()


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_with_an_unused_output(name):
    layer, x = tensors()
    *outs, alias = function(name, layer)(x)
    carried = torch.randn_like(x)
    alias.backward(carried, retain_graph=True)
    assert torch.equal(x.grad, carried) and all(p.grad is None for p in layer.parameters().values())
    dout = torch.randn_like(outs[0])
    (got,) = torch.autograd.grad(outs[0], x, dout)
    (expected,) = torch.autograd.grad(function(name, layer, residual=False)(x)[0], x, dout)
    assert torch.equal(got, expected)
