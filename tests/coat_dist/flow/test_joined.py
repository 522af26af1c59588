"""Several weights of one product: the bits of their concatenation, in any order of heads and
positions.
"""

import itertools

import pytest
import torch

from coat_dist.flow import Heads, norm_linear, norm_mlp, norm_qkv, rope_table
from tests.support import equal

from .common import ONE, Layer, settings
from .saved_bytes import saved

SIZES = (64, 32, 32)  # of queries, keys, values
HEADS = Heads(groups=2, per_group=2, size=16, blocks=True)
S, B, H = 10, 3, 64
SETTINGS = [
    settings(forward=forward, forward_scales=scales)
    for forward, scales in itertools.product(("exact", "quantized"), ("row", "tensor"))
]


def qkv_parameters(dtype, biased=True):
    layer = Layer.random(h=H, n=sum(SIZES), dtype=dtype, biased=True)
    apart = [
        [t.detach().clone().requires_grad_() for t in whole.split(SIZES)]
        for whole in (layer.weight, layer.bias)
    ]
    return layer, apart[0], apart[1] if biased else None


def table(rows=1):
    return rope_table(torch.randn(S, rows, 1, 12) * 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_norm_qkv_of_joined_weights(config, dtype):
    layer, apart, biases = qkv_parameters(dtype)
    x = torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    angles = table()
    found = []
    for weight, bias in ((layer.weight, layer.bias), (apart, biases)):
        *outs, alias = norm_qkv(
            x, layer.norm, weight, bias, HEADS, angles, ONE, config, residual=True
        )
        torch.manual_seed(0)
        upstream = [torch.randn_like(t) for t in (*outs, alias)]
        leaves = [x, layer.norm_weight]
        mine = [weight, bias] if isinstance(weight, torch.Tensor) else [*weight, *bias]
        dx, dnorm, *rest = torch.autograd.grad((*outs, alias), [*leaves, *mine], upstream)
        if len(rest) > 2:
            rest = [torch.cat(rest[:3]), torch.cat(rest[3:])]
        found.append([*outs, dx, dnorm, *rest])
    assert equal(*found)


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("config", [settings(), settings(forward_scales="tensor")], ids=str)
def test_norm_qkv_batch_first(config, rows):
    layer, apart, biases = qkv_parameters(torch.float32)
    x, angles = torch.randn(S, B, H, requires_grad=True), table(rows)
    first = Heads(HEADS.groups, HEADS.per_group, HEADS.size, blocks=True, batch_first=True)
    turn = lambda t: t.transpose(0, 1).contiguous()  # noqa: E731
    wanted = norm_qkv(x, layer.norm, apart, biases, HEADS, angles, ONE, config)
    got = norm_qkv(turn(x), layer.norm, apart, biases, first, angles, ONE, config)
    assert all(torch.equal(g, turn(w)) for g, w in zip(got, wanted, strict=True))
    upstream = [torch.randn_like(t) for t in wanted]
    dx = torch.autograd.grad(wanted, [x], upstream)[0]
    assert torch.equal(torch.autograd.grad(got, [x], [turn(t) for t in upstream])[0], dx), (
        "sums go by token"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_norm_mlp_of_gate_and_up(config, biased, dtype):
    layer = Layer.random(h=H, f=96, dtype=dtype, biased=biased)
    parts = [t.detach().clone().requires_grad_() for t in layer.fc1.split(96)]
    biases = (
        [t.detach().clone().requires_grad_() for t in layer.fc1_bias.split(96)] if biased else []
    )
    x = torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    whole = norm_mlp(x, layer.norm, layer.fc1, layer.fc2, "swiglu", ONE, config, layer.fc1_bias)
    joined = norm_mlp(x, layer.norm, parts, layer.fc2, "swiglu", ONE, config, biases or None)
    assert torch.equal(whole, joined)
    upstream, common = torch.randn_like(whole), [x, layer.norm_weight, layer.fc2]
    wanted = torch.autograd.grad(
        whole, [*common, layer.fc1, *([layer.fc1_bias] if biased else [])], upstream
    )
    got = torch.autograd.grad(joined, [*common, *parts, *biases], upstream)
    assert equal(wanted[:3], got[:3])
    assert torch.equal(wanted[3], torch.cat(got[3:5])) and (
        not biased or torch.equal(wanted[4], torch.cat(got[5:]))
    )


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_norm_linear_gradients_of_joined_weights_are_views(scales):
    """One product makes them, and ``.grad`` is its memory."""
    layer, apart, _ = qkv_parameters(torch.float32)
    norm_linear(
        torch.randn(S, B, H), layer.norm, apart, None, ONE, settings(forward_scales=scales)
    ).sum().backward()
    storages = {w.grad.untyped_storage().data_ptr() for w in apart}
    assert len(storages) == 1 and [w.grad.shape for w in apart] == [w.shape for w in apart]


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
def test_norm_linear_of_joined_weights_some_frozen(frozen):
    layer, apart, biases = qkv_parameters(torch.float32)
    x, config = torch.randn(S, B, H), settings()
    norm_linear(x, layer.norm, apart, biases, ONE, config).square().sum().backward()
    full, layer.norm_weight.grad = [w.grad for w in apart], None
    for i, w in enumerate(apart):
        w.grad = None
        w.requires_grad_(i not in frozen)
    norm_linear(x, layer.norm, apart, biases, ONE, config).square().sum().backward()
    for i, w in enumerate(apart):
        assert (w.grad is None) == (i in frozen) and (
            w.grad is None or torch.equal(w.grad, full[i])
        )


def test_norm_linear_adds_to_main_grad_of_each_weight():
    layer, apart, _ = qkv_parameters(torch.float32)
    x = torch.randn(S, B, H)
    norm_linear(x, layer.norm, apart, None, ONE, settings()).square().sum().backward()
    for w in apart:
        w.main_grad = torch.ones_like(w)
    norm_linear(
        x, layer.norm, apart, None, ONE, settings(wgrad="main_grad")
    ).square().sum().backward()
    assert all(torch.equal(w.main_grad, 1 + w.grad) for w in apart)


def test_norm_linear_of_joined_weights_saved_bytes():
    layer, apart, biases = qkv_parameters(torch.bfloat16)
    x = torch.randn(S, B, H, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    for weight, bias in ((layer.weight, layer.bias), (apart, biases)):
        mine = [weight, bias] if isinstance(weight, torch.Tensor) else [*weight, *bias]
        call = lambda w=weight, b=bias: norm_linear(x, layer.norm, w, b, ONE, settings())  # noqa: E731
        kept.append(sum(saved(call, *mine, layer.norm_weight).values()))
    assert kept[0] == kept[1]


def test_norm_linear_refuses_joined_misfits():
    layer, apart, biases = qkv_parameters(torch.float32)
    x = torch.randn(S, B, H)
    for weight, bias, message in (
        (apart, biases[:2], "bias: got 2, accepted: 3, one for each weight, or None"),
        (apart, [*biases[:2], torch.ones(5)], r"bias: got shape \[5\], accepted: \[32\]"),
        ([*apart[:2], torch.ones(32, 60)], biases, r"weight: got shape \[32, 60\]"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_linear(x, layer.norm, weight, bias, ONE, settings())
