"""Attention on a GPU: SDPA's own kernels on rounded values, bytes, no host sync."""

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import (
    Heads,
    Norm,
    TensorParallel,
    attention,
    linear,
    norm_qkv,
    rope_table,
    sdpa,
)
from coat_dist.reference.quantize import dequantize
from tests.coat_dist.flow.common import relative_error
from tests.coat_dist.flow.test_attention import check_sink_attention, rounded
from tests.support.devices import CONVERTS_FP8, captured, nothing_waits

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

ONE = TensorParallel()
FP8 = ActivationConfig(attention="fp8")


def qkv(s, b, heads, groups, d):
    shapes = (s, b, heads, d), (s, b, groups, d), (s, b, groups, d)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes
    ]


SHAPES = [(512, 2, 8, 8, 128), (513, 1, 8, 2, 128), (256, 2, 6, 1, 64), (128, 1, 4, 4, 80)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "form",
    [("mixed", "e8m0", 32), ("int8", "bf16", 32), ("e4m3", "e8m0", 32), ("e5m2", "bf16", 16)],
)
def test_forward_and_gradients_are_sdpas_on_rounded_values(shape, form):
    config = ActivationConfig(
        attention="fp8", saved_format=form[0], scale=form[1], group_size=form[2]
    )
    inputs, d = qkv(*shape), shape[-1]
    out, o8 = attention(*inputs, config)
    values = [rounded(t, config, d).requires_grad_() for t in inputs]
    plain = sdpa(*values)
    o = rounded(plain, config, d)
    assert torch.equal(out, o)
    assert torch.equal(out, dequantize(o8).bfloat16().view(out.shape))

    # The same node of autograd's, given the rounded output where it asks for the one that it saved.
    saved = []

    def unpack(i):
        t = saved[i]
        if t.data_ptr() != plain.data_ptr():
            return t
        heads = o.view(shape[0], shape[1], shape[2], d).permute(1, 2, 0, 3)
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(heads)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t) or len(saved) - 1, unpack
    ):
        plain = sdpa(*values)
    dout = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, inputs, dout),
        torch.autograd.grad(plain, values, dout),
        strict=True,
    ):
        # The kernels add parts of dq in any order, so its last bit may differ from run to run.
        assert relative_error(got, wanted) < 3e-3


@pytest.mark.skipif(
    torch.cuda.get_device_capability()[0] != 9, reason="prefers cuDNN on Hopper only"
)
def test_cudnn_runs_inside():
    out, _ = attention(*qkv(*SHAPES[0]), FP8)
    assert "Cudnn" in out.grad_fn.node._output_edge.node.name()


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_bytes_that_stay_allocated(shape):
    s, b, heads, groups, d = shape
    config, weight = (
        FP8,
        torch.randn(256, heads * d, device="cuda", dtype=torch.bfloat16, requires_grad=True),
    )

    def run(inputs):
        out, o8 = attention(*inputs, config)
        return linear(out, weight, ONE, config, o8)

    inputs = qkv(*shape)
    run(inputs).sum().backward()  # workspaces are allocated on first use
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = run(inputs)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - out.nbytes
    planned = s * b * ((2 * heads + 2 * groups) * (d + d // 32) + 4 * heads)
    # cuDNN may fill logarithms of sums up to whole tiles; the allocator rounds each tensor up to
    # 512 bytes.
    assert planned <= held <= planned + 20 * 512 + 4 * b * heads * 128, (held, planned)
    del out


def layer(s=256, b=2, h=1024, heads=8, scales="row"):
    def leaf(*shape):
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16().requires_grad_()

    norm = Norm(
        "rmsnorm", 1e-5, torch.ones(h, device="cuda", dtype=torch.bfloat16).requires_grad_()
    )
    split, table = (
        Heads(heads, 1, h // heads),
        rope_table(torch.randn(s, 1, 1, h // heads, device="cuda")),
    )
    qkv_weight, proj_weight = leaf(3 * h, h), leaf(h, h)
    config = FP8.model_copy(update={"forward_scales": scales})

    def run(x):
        q, k, v = norm_qkv(x, norm, qkv_weight, None, split, table, ONE, config)
        out, o8 = attention(q, k, v, config)
        return linear(out, proj_weight, ONE, config, o8)

    return run, leaf(s, b, h), [norm.weight, qkv_weight, proj_weight]


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_captured_in_a_cuda_graph(scales):
    run, x, parameters = layer(scales=scales)
    inputs, static = [x, *parameters], torch.randn_like(x).requires_grad_()

    def work():
        out = run(static)
        return out, torch.autograd.grad(out.sum(), [static, *parameters])

    graph, (found, found_grads) = captured(work)
    with torch.no_grad():
        static.copy_(x)
    graph.replay()
    with nothing_waits():
        out = run(x)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(found, out)
    for got, wanted in zip(found_grads, grads, strict=True):
        # An amax that moves with the order of cuDNN's sums turns a few codes of the gradients that
        # follow.
        assert relative_error(got, wanted) < 5e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_sinks(dtype):
    check_sink_attention(dtype, "cuda", 1031)
