"""Changes in place, of outputs and of inputs: they give the gradients of the same change made out
of place, or raise.

A BF16 model allows them, and code around it uses them: ``losses *= mask``, ``logits.mul_(factor)``.
"""

import pytest
import torch

from coat_dist.flow import attention, linear, sdpa
from tests.support import equal

from .catalogue import NAMES, H, catalogue, layer_for_all, leaves
from .common import ONE, settings

REFUSED = {"attention": "is a view and is being modified inplace"}
"""What autograd refuses at once."""
NEEDED = {"sdpa": "modified by an inplace operation"}
"""Outputs that backward needs: autograd refuses there."""
SHAPES = [(6, 2, torch.float32), (6, 1, torch.bfloat16), (1, 1, torch.float32)]


def grads(outs, inputs, weightings):
    return torch.autograd.grad(outs, inputs, weightings, allow_unused=True)


def changed(t):
    """By ``t`` itself too, so that the gradient depends on the value before the change."""
    return (t + 1) * torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype)


def change_(t):
    t += 1
    return t.mul_(torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype))


@pytest.mark.parametrize(("s", "b", "dtype"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_functions_whose_outputs_are_changed_in_place(name, s, b, dtype):
    layer = layer_for_all(dtype)
    call, x = catalogue(layer)[name], torch.randn(s, b, H, dtype=dtype, requires_grad=True)
    expected = [changed(t) for t in call(x)]
    weightings = [torch.randn_like(t) for t in expected]
    wanted = grads(expected, leaves(layer, x), weightings)
    for i in range(len(expected)):
        outs = call(x)
        if name in REFUSED:
            with pytest.raises(RuntimeError, match=REFUSED[name]):
                change_(outs[i])
            return
        outs = [change_(t) if i == j else changed(t) for j, t in enumerate(outs)]
        assert equal(outs, expected)
        if name in NEEDED:
            with pytest.raises(RuntimeError, match=NEEDED[name]):
                grads(outs, leaves(layer, x), weightings)
        else:
            assert equal(grads(outs, leaves(layer, x), weightings), wanted)


@pytest.mark.parametrize("name", ["norm_qkv", "norm_mlp"])
def test_residual_alias_changed_in_place_is_refused(name):
    layer, x = layer_for_all(), torch.randn(6, 2, H, requires_grad=True)
    call = catalogue(layer, residual=True)[name]
    *outs, alias = call(x)
    expected = [*(changed(t) for t in outs), alias * 2]
    weightings = [torch.randn_like(t) for t in expected]
    wanted = grads(expected, leaves(layer, x), weightings)
    *outs, alias = call(x)
    got = [*(change_(t) for t in outs), alias * 2]
    assert equal(grads(got, leaves(layer, x), weightings), wanted)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        alias += 1
    # Through x, of which it is an alias: the alias's own gradient would be that of the old value.
    inner = x * 1
    *_, alias = call(inner)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        (alias * 1).sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_functions_whose_inputs_are_changed_in_place(name):
    """What backward needs of an input is either a copy in FP8 or guarded by autograd's version
    counter.
    """
    layer = layer_for_all()
    call, x = catalogue(layer)[name], torch.randn(6, 2, H, requires_grad=True)
    outs = call(x * 1)
    weightings = [torch.randn_like(t) for t in outs]
    wanted = grads(outs, leaves(layer, x), weightings)
    inner = x * 1
    outs = call(inner)
    with torch.no_grad():
        inner.mul_(2)
    try:
        got = grads(outs, leaves(layer, x), weightings)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert equal(got, wanted)


@pytest.mark.parametrize("compressed", [False, True])
def test_linear_after_attention_changed_in_place(compressed):
    """``linear`` keeps attention's output, or its codes. A change after it is refused in
    backward, or harmless.
    """
    layer, x = layer_for_all(), torch.randn(6, 2, 4, 16, requires_grad=True)

    def run():
        if compressed:
            return attention(x, x, x, settings())
        return sdpa(x, x, x), None

    o, o8 = run()
    wanted = torch.autograd.grad(
        linear(o, layer.weight, ONE, settings(), o8).sum(), [x, layer.weight]
    )
    o, o8 = run()
    y = linear(o, layer.weight, ONE, settings(), o8)
    with torch.no_grad():
        o.mul_(2)
    if compressed:
        assert equal(torch.autograd.grad(y.sum(), [x, layer.weight]), wanted)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), [x, layer.weight])
