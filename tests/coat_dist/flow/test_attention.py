"""FP8 attention: forward and gradients are SDPA's on the rounded values, and only codes are
kept.
"""

import gc
import importlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_dist.flow import TensorParallel, attention, linear, sdpa, sink_attention
from coat_dist.flow.core.products import saved_format
from coat_dist.formats import QuantizedTensor
from coat_dist.reference.quantize import dequantize, quantize_groups
from tests.support import equal

from .common import settings
from .saved_bytes import saved, scale_bytes

S, B, HEADS = 40, 2, 4
ONE = TensorParallel()
FORMS = [
    settings(saved_format=fmt, scale=scale, group_size=size)
    for fmt, scale, size in [("e3m4", "e8m0", 32), ("e4m3", "e8m0", 32), ("e5m2", "bf16", 16)]
]


def qkv(groups=2, d=64, dtype=torch.bfloat16, keys=S):
    shapes = (S, B, HEADS, d), (keys, B, groups, d), (keys, B, groups, d)
    return [torch.randn(shape).mul(2).to(dtype).requires_grad_() for shape in shapes]


def rounded(x, config, d):
    """Rounded by groups within heads."""
    x = x.detach()
    q = quantize_groups(
        x.unflatten(-1, (-1, d)), saved_format(config), config.group_size, config.scale
    )
    return dequantize(q).to(x.dtype).view(x.shape)


def heads_first(*tensors):
    return [t.permute(1, 2, 0, 3) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "d"), [(4, 64), (2, 64), (1, 24)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", FORMS)
def test_attention_is_sdpa_on_rounded_values(dtype, groups, d, causal, config):
    inputs = qkv(groups, d, dtype, S if causal else S + 7)
    out, o8 = attention(*inputs, config, causal=causal, scale=0.2)
    values = heads_first(*(rounded(t, config, d) for t in inputs))

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    plain, lse = kernel(*values, 0.0, causal, scale=0.2)
    o = rounded(plain.permute(2, 0, 1, 3), config, d)
    assert out.dtype == dtype and torch.equal(out, o.flatten(2))
    assert torch.equal(out, dequantize(o8).to(dtype).view(out.shape))

    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_heads = dout.view(S, B, HEADS, d).permute(1, 2, 0, 3)
    expected = back(d_heads, *values, o.permute(1, 2, 0, 3), lse, 0.0, causal, scale=0.2)
    for got, wanted in zip(grads, expected, strict=True):
        assert torch.equal(got, wanted.permute(2, 0, 1, 3))


@pytest.mark.parametrize("groups", [4, 2])
def test_attention_with_any_backend_of_sdpa(groups):
    """The math backend saves other tensors, never its output: gradients are those of autograd,
    to the bit.
    """
    config, inputs = settings(), qkv(groups)
    values = [rounded(t, config, 64).requires_grad_() for t in inputs]
    with sdpa_kernel([SDPBackend.MATH]):
        out, plain = attention(*inputs, config)[0], sdpa(*values)
        dout = torch.randn_like(out)
        grads = [torch.autograd.grad(o, i, dout) for o, i in ((out, inputs), (plain, values))]
    assert torch.equal(out, rounded(plain, config, 64))
    assert equal(*grads)


@pytest.mark.parametrize("d", [64, 24])
@pytest.mark.parametrize("config", FORMS)
def test_attention_saved_bytes(config, d):
    inputs, weight = qkv(2, d), torch.randn(48, HEADS * d, dtype=torch.bfloat16, requires_grad=True)

    def block():
        out, o8 = attention(*inputs, config)
        return linear(out, weight, ONE, config, o8)

    heads = 2 * HEADS + 2 * 2  # q, o; k, v
    per_token = heads * (d + scale_bytes(d, config)) + 4 * HEADS
    assert sum(saved(block, weight).values()) == S * B * per_token + 2 * 4


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_linear_multiplies_the_compressed_output_of_attention(products, scales):
    """x8 holds the values of o8 where the formats are the same: codes were rounded once; only
    values that become subnormal round again.
    """
    config = settings(forward_scales=scales, saved_format="e4m3")
    for _ in range(4):  # one amax in eight makes a power of two by itself
        products.clear()
        out, o8 = attention(*qkv(), config)
        weight = torch.randn(48, HEADS * 64, dtype=torch.bfloat16, requires_grad=True)
        linear(out, weight, ONE, config, o8).float().square().sum().backward()
        forward, _, wgrad = products
        x8, x8_t = forward.a, wgrad.b
        assert torch.equal(x8.scales.amax(), x8_t.scales)
        if scales == "tensor":
            assert torch.equal(x8.codes.view(torch.uint8), x8_t.codes.view(torch.uint8).t())
        assert (x8.scales.frexp()[0] == 0.5).all()  # a power of two
        rows = out.flatten(0, 1)
        for values, scale in ((dequantize(x8), x8.scales), (dequantize(x8_t).t(), x8_t.scales)):
            normal = rows.abs() >= 2.0**-6 * scale
            assert normal.float().mean() > 0.9
            assert torch.equal(values[normal], rows.float()[normal])
        largest = x8.codes.float().abs() if scales == "tensor" else x8.codes.float().abs().amax(-1)
        # No bit is given away.
        assert largest.max() > 224 and (scales == "tensor" or largest.min() > 224)


def gradients(run, inputs):
    out = run(*inputs)
    return out.detach(), torch.autograd.grad(out.float().sin().sum(), inputs)


def first(*inputs):
    return attention(*inputs, settings())[0]


@pytest.mark.long
def test_attention_compiled():
    inputs, weight = qkv(), torch.randn(48, HEADS * 64, dtype=torch.bfloat16, requires_grad=True)

    def block(*inputs):
        out, o8 = attention(*(2 * t for t in inputs), settings())
        return linear(out, weight, ONE, settings(), o8)

    compiled = torch.compile(block, backend="eager")
    assert equal(gradients(block, inputs), gradients(compiled, inputs))


def test_attention_of_frozen_inputs():
    inputs = qkv()
    _, expected = gradients(first, inputs)
    inputs[1].requires_grad_(False)
    _, (dq, dv) = gradients(lambda q, v: first(q, inputs[1], v), inputs[::2])
    assert torch.equal(dq, expected[0]) and torch.equal(dv, expected[2])


def test_attention_frees_all_with_the_graph():
    """The graph inside holds hooks that must not refer back to it: such a circle is never
    collected.
    """
    module = importlib.import_module("coat_dist.flow.blocks.sdpa_node")
    gc.disable()
    try:
        out = first(*qkv())
        node = out.grad_fn.node
        alive = [weakref.ref(node), weakref.ref(node._saved)]
        assert isinstance(node, module.Node)
        out.sum().backward()
        assert not node._saved._tensors
        del node, out
        assert not any(r() for r in alive)
    finally:
        gc.enable()


def test_attention_refuses_misfits():
    q, k, v = qkv()
    for arguments, message in (
        ((q[0], k, v), r"q: got torch.bfloat16 \[2, 4, 64\], accepted: \[s, b, heads, d\]"),
        ((q, k.float(), v), r"k: got torch.float32"),
        ((q.half(), k.half(), v.half()), r"q: got torch.float16"),
        ((q, k, v[:-1]), "k, v: got shapes"),
        ((q[:, :, :3], k, v), "a divisor of q's heads"),
        ((q[1:], k, v), "k: got 40 keys for 39 queries, accepted: equal lengths where causal"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*arguments, settings())
    out, o8 = attention(q, k, v, settings())
    weight = torch.randn(8, 256)
    for wrong in (
        QuantizedTensor(o8.codes, o8.scales, "tensor"),
        QuantizedTensor(o8.codes[1:], o8.scales, "group", 32),
    ):
        with pytest.raises(
            ValueError, match=r"compressed: got layout .*, accepted: layout 'group'"
        ):
            linear(out, weight, ONE, settings(), wrong)


@pytest.mark.parametrize("groups", [4, 2])
def test_sdpa_takes_sequence_first(groups):
    q, k, v = qkv(groups, dtype=torch.float32)
    expected = F.scaled_dot_product_attention(
        *heads_first(q, k, v), is_causal=True, enable_gqa=True
    )
    assert torch.equal(sdpa(q, k, v), expected.permute(2, 0, 1, 3).flatten(2))


def logits_and_sinks(q, k, v, sinks, mask, scale):
    """The definition of ``sink_attention``."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = q @ k.transpose(2, 3) * scale + mask
    logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return logits.softmax(-1)[..., :-1] @ v


def check_sink_attention(dtype, device, s):
    """Outputs and gradients beside those in fp64; a row that may read nothing gives zeros."""
    shapes = (B, HEADS, s, 64), (B, 2, s, 64), (B, 2, s, 64), (HEADS,)
    given = [torch.randn(n, dtype=dtype, device=device, requires_grad=True) for n in shapes]
    mask = torch.full((B, 1, s, s), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)
    mask[0, :, :, :3] = mask[0, 0, 0, -1]
    exact = [t.detach().double().requires_grad_() for t in given]
    out, wanted = (
        f(*t, mask, 0.3) for f, t in ((sink_attention, given), (logits_and_sinks, exact))
    )
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    right = torch.autograd.grad(wanted, exact, dout.double())
    assert out.dtype == dtype and not out[0, :, :3].any()
    q, k, v, sinks = given
    wider = sink_attention(q.float(), k.float(), v, sinks, mask, 0.3)  # as under autocast
    assert torch.equal(wider, out)
    for a, b in zip((out, *found), (wanted, *right), strict=True):
        limit = 1e-5 if dtype == torch.float32 else 0.02
        assert (a - b).norm() < limit * b.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("s", [1, 61])
def test_attention_with_sinks(dtype, s):
    check_sink_attention(dtype, "cpu", s + 3)
