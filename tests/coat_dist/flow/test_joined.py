"""Several weights of one product: the bits of their concatenation, in any order of heads and
positions.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from coat_dist.flow import norm_linear, norm_qkv, rope_table
from tests.support import equal

from .catalogue import HEADS, H, catalogue
from .common import ONE, Layer, settings
from .saved_bytes import saved

SIZES = (64, 32, 32)  # of queries, keys, values
S, B = 10, 3
CHANGES = [
    {"forward": forward, "forward_scales": scales}
    for forward, scales in itertools.product(("exact", "quantized"), ("row", "tensor"))
]


def apart(layer):
    """The layer with weights of queries, keys and values, and of gate and up, by themselves."""

    def split(t, sizes):
        return None if t is None else [part.detach().requires_grad_() for part in t.split(sizes)]

    return replace(
        layer,
        weight=split(layer.weight, SIZES),
        bias=split(layer.bias, SIZES),
        fc1=split(layer.fc1, 96),
        fc1_bias=split(layer.fc1_bias, 96),
    )


def results(layer, call, x):
    """Outputs, gradients of x and of joined parameters, and bytes that are kept."""
    outs = call(x)
    upstream = [torch.sin(torch.arange(t.numel())).view(t.shape).to(t.dtype) for t in outs]
    named = [[t] if isinstance(t, torch.Tensor) else t for t in vars(layer).values()]
    parameters = [parts for parts in named if isinstance(parts, list)]
    leaves = [x, *itertools.chain(*parameters)]
    dx, *grads = torch.autograd.grad(outs, leaves, upstream, allow_unused=True)
    joined = []
    for parts in parameters:
        mine, grads = grads[: len(parts)], grads[len(parts) :]
        joined.append(None if mine[0] is None else torch.cat(mine))
    return [*outs, dx, *joined], sum(saved(lambda: call(x)[0], *leaves[1:]).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("name", ["norm_linear", "norm_qkv", "norm_mlp"])
def test_functions_of_joined_weights(name, changes, biased, dtype):
    layer = Layer.random(h=H, n=HEADS.width, dtype=dtype, biased=biased)
    layer = layer if biased else replace(layer, bias=None)
    x = torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    found = []
    for one in (layer, apart(layer)):
        found.append(results(one, catalogue(one, residual=True, **changes)[name], x))
    (wanted, kept), (got, kept_apart) = found
    assert equal(got, wanted) and kept == kept_apart


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_norm_qkv_batch_first(scales, rows):
    layer, config = joined_layer(), settings(forward_scales=scales)
    x = torch.randn(S, B, H, requires_grad=True)
    angles = rope_table(torch.randn(S, rows, 1, 12) * 9)
    heads = replace(HEADS, blocks=True)
    turn = lambda t: t.transpose(0, 1).contiguous()  # noqa: E731
    arguments = layer.norm, layer.weight, layer.bias
    wanted = norm_qkv(x, *arguments, heads, angles, ONE, config)
    got = norm_qkv(turn(x), *arguments, replace(heads, batch_first=True), angles, ONE, config)
    assert all(torch.equal(g, turn(w)) for g, w in zip(got, wanted, strict=True))
    upstream = [torch.randn_like(t) for t in wanted]
    dx = torch.autograd.grad(wanted, [x], upstream)[0]
    assert torch.equal(torch.autograd.grad(got, [x], [turn(t) for t in upstream])[0], dx), (
        "sums go by token"
    )


def joined_layer():
    return apart(Layer.random(h=H, n=HEADS.width))


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_norm_linear_gradients_of_joined_weights_are_views(scales):
    """One product makes them, and ``.grad`` is its memory."""
    layer, config = joined_layer(), settings(forward_scales=scales)
    norm_linear(torch.randn(S, B, H), layer.norm, layer.weight, None, ONE, config).sum().backward()
    grads = [w.grad for w in layer.weight]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert [grad.shape for grad in grads] == [w.shape for w in layer.weight]


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
def test_norm_linear_of_joined_weights_some_frozen(frozen):
    layer, x, config = joined_layer(), torch.randn(S, B, H), settings()

    def run():
        out = norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config)
        out.square().sum().backward()

    run()
    full = [w.grad for w in layer.weight]
    for i, w in enumerate(layer.weight):
        w.grad = None
        w.requires_grad_(i not in frozen)
    run()
    for i, w in enumerate(layer.weight):
        assert equal(w.grad, None if i in frozen else full[i])


def test_norm_linear_adds_to_main_grad_of_each_weight():
    layer, x = joined_layer(), torch.randn(S, B, H)
    for w in layer.weight:
        w.main_grad = torch.ones_like(w)
    for wgrad in ("grad", "main_grad"):
        out = norm_linear(x, layer.norm, layer.weight, None, ONE, settings(wgrad=wgrad))
        out.square().sum().backward()
    assert all(torch.equal(w.main_grad, 1 + w.grad) for w in layer.weight)


def test_norm_linear_refuses_joined_misfits():
    layer, x = joined_layer(), torch.randn(S, B, H)
    weights, biases = layer.weight, layer.bias
    for weight, bias, message in (
        (weights, biases[:2], "bias: got 2, accepted: 3, one for each weight, or None"),
        (weights, [*biases[:2], torch.ones(5)], r"bias: got shape \[5\], accepted: \[32\]"),
        ([*weights[:2], torch.ones(32, 60)], biases, r"weight: got shape \[32, 60\]"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_linear(x, layer.norm, weight, bias, ONE, settings())
