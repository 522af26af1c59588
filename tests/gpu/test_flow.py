"""The precision flow on a GPU: tensor-core products against the definition, the same codes as on
CPU, no host sync.
"""

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, linear, norm_linear, vocab_parallel_cross_entropy
from coat_dist.formats import E4M3, E5M2, FORMATS, QuantizedTensor
from coat_dist.ops import scaled_mm
from coat_dist.reference import gemm as reference
from coat_dist.reference.quantize import (
    amax,
    dequantize,
    quantize_rows,
    quantize_tensor,
    tensor_scale,
)
from tests.coat_dist.flow import test_adapters as adapters
from tests.coat_dist.flow import test_tiles as tiles
from tests.coat_dist.flow.common import Layer, median_error, relative_error
from tests.support import equal
from tests.support.devices import nothing_waits

ONE = TensorParallel()


def on_gpu(q):
    return QuantizedTensor(q.codes.cuda(), q.scales.cuda(), q.layout, q.group_size)


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("b_fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 256, 512), (48, 64, 4096), (17, 33, 100), (1, 16, 16), (5, 7, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tensor", "row"])
def test_products_against_the_definition(a_fmt, b_fmt, m, n, k, dtype, layout):
    """Rows of very different magnitudes where each has its scale: errors are measured by those
    of row and column.
    """
    a, b = torch.randn(m, k), torch.randn(n, k)
    if layout == "tensor":
        a, b = (
            quantize_tensor(t, f, tensor_scale(amax(t), f)) for t, f in ((a, a_fmt), (b, b_fmt))
        )
    else:
        a, b = (t * torch.exp2(torch.randint(-20, 20, (len(t), 1)).float()) for t in (a, b))
        a, b = quantize_rows(a, a_fmt), quantize_rows(b, b_fmt)
    expected = reference.scaled_mm(a, b, torch.float32)
    typical = expected.square().mean().sqrt()
    if layout == "row":
        typical = (
            reference.code_products(a, b).square().mean().sqrt().float() * a.scales * b.scales.t()
        )
    for fast_accum in (False, True):
        got = scaled_mm(on_gpu(a), on_gpu(b), dtype, fast_accum)
        assert got.dtype == dtype and got.shape == (m, n) and got.is_contiguous()
        # About twice what an H200 shows for these shapes and more: the table is in docs/flow.md.
        rounding = 2.0**-8 * expected.abs() if dtype == torch.bfloat16 else 0.0
        error = (got.cpu().float() - expected).abs()
        assert (error <= rounding + (0.05 if fast_accum else 0.003) * typical).all(), (
            error / typical
        ).max()
        if dtype == torch.float32 and layout == "tensor":
            assert error.square().mean().sqrt() < (4e-3 if fast_accum else 4e-4) * typical


def test_products_of_a_bad_row_and_of_no_rows():
    a, b = torch.randn(6, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    a[4, 9] = torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        got = scaled_mm(quantize_rows(a, E4M3), quantize_rows(b, E4M3), dtype)
        assert got[4].isnan().all() and got[[0, 1, 2, 3, 5]].isfinite().all()
        assert scaled_mm(quantize_rows(a[:0], E4M3), quantize_rows(b, E4M3), dtype).shape == (0, 32)


def train(layer, x, device, config):
    moved = layer.copy(device)
    x = x.to(device).requires_grad_()
    out = moved.flow(x, config)
    weighting = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape).to(device)
    grads = torch.autograd.grad(out, [x, *moved.parameters().values()], weighting)
    return dict(
        zip(
            ["output", "x", *moved.parameters()],
            [out.detach().cpu(), *(g.cpu() for g in grads)],
            strict=True,
        )
    )


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("grad_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("invariant", [False, True])
def test_layer_agrees_with_the_cpu(forward, scales, grad_format, kind, invariant):
    layer, x = Layer.random(h=128, n=192, f=256, kind=kind), torch.randn(50, 4, 128)
    config = ActivationConfig(
        forward=forward, forward_scales=scales, grad_format=grad_format, tp_invariant=invariant
    )
    cpu, gpu = (train(layer, x, device, config) for device in ("cpu", "cuda"))
    noise = 0.15 if grad_format == "e4m3" else 0.3
    for name in cpu:
        # Exact sums leave a few codes that differ at ties. The tensor cores' sums move every value
        # by up to 1e-3, which turns one code in fifty; behind a few GEMMs in a row little but the
        # size of the rounding errors is the same.
        # E5M2 has half as many codes in an octave. (Medians up to 0.0075 and 0.011 were seen, and
        # 0.033 of the norm's bias with E5M2.)
        exact = 0.01 if grad_format == "e4m3" else 0.02
        assert relative_error(gpu[name], cpu[name]) < (3 * exact if invariant else noise), name
        assert median_error(gpu[name], cpu[name]) < (exact if invariant else noise), name


def wide_tokens(*shape):
    """Rows of very different sizes, on the GPU."""
    return (
        (torch.randn(shape) * torch.exp2(torch.randint(-8, 8, (*shape[:-1], 1)).float()))
        .bfloat16()
        .cuda()
    )


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("rows", "k", "n"), [(50, 192, 128), (33, 72, 40), (17, 4096, 64)])
def test_row_scales_change_forward_alone(fmt, rows, k, n):
    """Forward is the definition's product by rows; gradients have the bits that per-tensor
    scales give.
    """
    x, weight = wide_tokens(rows, k).requires_grad_(), wide_tokens(n, k)
    # Subnormal with one scale for all; powers of two as scales change nothing else.
    weight[::3] *= 2.0**-40
    weight.requires_grad_()
    weighting, outs, grads = wide_tokens(rows, n), [], []
    for scales in ("tensor", "row"):
        out = linear(x, weight, ONE, ActivationConfig(format=fmt, forward_scales=scales))
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out, [x, weight], weighting))
    assert not torch.equal(*outs)
    assert equal(*grads)
    operands = [quantize_rows(t.detach().cpu(), FORMATS[fmt], aligned=True) for t in (x, weight)]
    expected = reference.scaled_mm(*operands, torch.float32)
    # Of one output.
    typical = torch.outer(*(dequantize(q).norm(dim=-1) for q in operands)) * k**-0.5
    error = (outs[1].cpu().float() - expected).abs()
    # As above with fast accumulation; a product of E5M2 has its scales applied to fp32 sums.
    assert (error <= 2.0**-7 * expected.abs() + 0.05 * typical).all()


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_row_scales_and_gradients_behind_a_norm(forward, kind):
    """Per-tensor scale and saved tensors come from another kernel, which may round an element's
    last bit otherwise.
    """
    layer = Layer.random(h=128, n=192, f=256, kind=kind).copy("cuda")
    x = torch.randn(200, 128, device="cuda", requires_grad=True)
    leaves = [x, layer.norm_weight, layer.weight, layer.bias]
    weighting, grads = torch.randn(200, 192, device="cuda"), []
    for scales in ("tensor", "row"):
        config = ActivationConfig(forward=forward, forward_scales=scales)
        out = norm_linear(x, layer.norm, layer.weight, layer.bias, ONE, config)
        grads.append(torch.autograd.grad(out, leaves, weighting))
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 0.01


@pytest.mark.parametrize("forward", ["exact", "quantized"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_nothing_waits_for_the_gpu(forward, scales):
    layer = Layer.random(h=128, n=192, f=256)
    config = ActivationConfig(forward=forward, forward_scales=scales)
    # First use may synchronize: handles, workspaces.
    train(layer, torch.randn(32, 4, 128), "cuda", config)
    layer = layer.copy("cuda")
    x = torch.randn(32, 4, 128, device="cuda", requires_grad=True)
    labels = torch.randint(0, 128, (32, 4), device="cuda")
    with nothing_waits():
        vocab_parallel_cross_entropy(layer.flow(x, config), labels, ONE).mean().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", tiles.CASES)
def test_tiles(name):
    with torch.device("cuda"):
        tiles.test_pieces_have_the_bits_of_the_whole(name, 3, 8208, 1024, 3584)


@pytest.mark.parametrize("name", adapters.ALL)
def test_adapters(name):
    with torch.device("cuda"):
        adapters.test_adapters_by_their_definition(name, adapters.MODES[0])
        adapters.test_checkpointed_adapters(name, False)
