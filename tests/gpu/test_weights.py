"""Weights of the flow on a GPU: kept codes are those of every use, main_grad takes no second copy,
graphs replay.
"""

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, grouped_mlp, invalidate_weights
from coat_dist.flow.core import main_grad
from coat_dist.flow.core.weights import Weight
from coat_dist.formats import E4M3, QuantizedTensor
from coat_dist.ops import amax, quantize_tensor, tensor_scale
from coat_dist.reference import gemm as reference
from tests.coat_dist.flow.common import Layer
from tests.support import equal
from tests.support.devices import captured, nothing_waits

ONE = TensorParallel()
NAMES = ("weight", "back", "fc1", "fc2")


def quantized(rows, columns, fmt=E4M3):
    t = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return quantize_tensor(t, fmt, tensor_scale(amax(t), fmt))


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    invalidate_weights()


def experts(dtype):
    """``call(x, weights)`` of three experts, and their first weight."""
    counts = torch.tensor([64, 0, 128], device="cuda")
    first = torch.nn.Parameter(torch.randn(256, 3 * 512, device="cuda").to(dtype))
    last = torch.randn(3 * 512, 256, device="cuda").to(dtype)

    def call(x, weights, **options):
        settings = ActivationConfig(weights=weights, **options)
        return grouped_mlp(x, counts, first, last, "gelu", settings)

    return call, first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_kept_codes_give_the_bits_of_every_use(dtype, scales):
    call, weight = experts(dtype)
    for factor in (1.0, 0.5):
        with torch.no_grad():
            weight.mul_(factor)
        for _ in range(3):
            x = torch.randn(192, 256, device="cuda", dtype=weight.dtype, requires_grad=True)
            dy, runs = torch.randn_like(x), []
            for mode in ("on_use", "cached"):
                out = call(x, mode, forward_scales=scales)
                runs.append((out, *torch.autograd.grad(out, [x, weight], dy)))
            assert equal(*runs)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize(("n", "k", "m"), [(768, 512, 1024), (336, 64, 4096), (1040, 48, 160)])
@pytest.mark.parametrize("offset", [None, 0, 1, 64])
def test_main_grad_against_the_definition(monkeypatch, main_dtype, chunk, n, k, m, offset):
    """Added to what is there; or, with an offset, written so many elements into a buffer that is
    said to be zero.
    """
    monkeypatch.setattr(main_grad, "_CHUNK", chunk)
    d8_t, x8_t = quantized(n, m), quantized(k, m)
    parameter = torch.nn.Parameter(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    before = torch.randn(n, k, device="cuda").to(main_dtype)
    parameter.main_grad = before.clone()
    if offset is not None:
        buffer = torch.full((offset + n * k,), torch.nan, device="cuda", dtype=main_dtype)
        parameter.main_grad, parameter.coat_zeroed = buffer[offset:].view(n, k), True
        before.zero_()
    handle = Weight((parameter,), ONE, ActivationConfig(wgrad="main_grad"))
    assert handle.gradients(d8_t, x8_t) == [None]
    cpu = [QuantizedTensor(q.codes.cpu(), q.scales.cpu(), "tensor") for q in (d8_t, x8_t)]
    product = reference.scaled_mm(*cpu, torch.float32)
    expected = before.float().cpu() + product
    rounding = 2.0**-8 * expected.abs() if main_dtype == torch.bfloat16 else 0.0
    error = (parameter.main_grad.float().cpu() - expected).abs()
    # As tests/gpu/test_flow.py, split.
    assert (error <= rounding + 0.003 * product.square().mean().sqrt()).all()


def test_main_grad_needs_no_second_copy():
    n, k, m = 22016, 4096, 256
    d8_t, x8_t = quantized(n, m), quantized(k, m)
    parameter = torch.nn.Parameter(torch.zeros(n, k, device="cuda", dtype=torch.bfloat16))
    parameter.main_grad = torch.zeros(n, k, device="cuda")
    handle = Weight((parameter,), ONE, ActivationConfig(wgrad="main_grad"))
    handle.gradients(d8_t, x8_t)  # first use allocates workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    handle.gradients(d8_t, x8_t)
    assert torch.cuda.max_memory_allocated() - before <= 66 * 2**20  # one block, and small change
    assert parameter.main_grad.abs().sum() > 0


def test_nothing_waits_for_the_gpu():
    layer = Layer.random(h=128, n=192, f=256).copy("cuda")
    for name in NAMES:
        getattr(layer, name).main_grad = torch.zeros_like(getattr(layer, name))
        getattr(layer, name).grad_added_to_main_grad = False
    settings = ActivationConfig(wgrad="main_grad")
    x = torch.randn(32, 4, 128, device="cuda", requires_grad=True)
    layer.flow(x, settings).sum().backward()  # first use may synchronize: handles, workspaces
    with nothing_waits():
        for _ in range(2):
            layer.flow(x, settings).sum().backward()
    assert all(getattr(layer, name).main_grad.isfinite().all() for name in NAMES)


def test_a_captured_graph_quantizes_the_weights_of_each_replay():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("elsewhere products of experts wait for the numbers of tokens")
    call, weight = experts(torch.bfloat16)
    x = torch.randn(192, 256, device="cuda", dtype=weight.dtype)
    with torch.no_grad():
        graph, out = captured(lambda: call(x, "cached"))
        for _ in range(2):
            weight.mul_(0.5)
            graph.replay()
            assert torch.equal(out, call(x, "on_use"))
