"""One AdamW step: against torch, against an fp64 oracle, and its memory."""

import math

import pytest
import torch

from coat_dist.reference import adamw
from coat_dist.reference.adamw import AdamWStep, adamw_fp32_step, adamw_step
from coat_dist.reference.moments import MomentCodec, decode, encode
from tests.support import equal
from tests.support.devices import DEVICE, on_device

from . import adamw_problems as problems

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def problem(n, seed=0, param=torch.float32, grad=torch.float32):
    g = torch.Generator().manual_seed(seed)
    rand = lambda: torch.randn(n, generator=g)  # noqa: E731
    codec_m, codec_v = MomentCodec(), MomentCodec(keep_nonzero=True)
    m, v = encode(rand() * 0.1, codec_m), encode(rand() ** 2 * 0.01, codec_v)
    return rand().to(param), rand().to(grad), m, v, codec_m, codec_v


def oracle(param, grad, m, v, h):
    """The module's formula, in fp64."""
    p, g, m, v = (x.double() for x in (param, grad, m, v))
    g = -g if h.maximize else g
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * g * g
    update = m / (1 - h.beta1**h.step) / ((v / (1 - h.beta2**h.step)).sqrt() + h.eps)
    return p * (1 - h.lr * h.weight_decay) - h.lr * update, m, v


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("n", [1, 127, 128, 1000])
def test_adamw_step_is_decode_update_encode(n, maximize):
    param, grad, m, v, codec_m, codec_v = problem(n)
    h = AdamWStep(0.01, 0.9, 0.95, 1e-8, 0.1, 3, maximize)
    p64, m64, v64 = oracle(param, grad, decode(m, codec_m, n), decode(v, codec_v, n), h)
    before = grad.clone()
    adamw_step(param, grad, m, v, codec_m, codec_v, h)
    assert torch.allclose(param.double(), p64, rtol=1e-6, atol=1e-6)
    assert torch.equal(grad, before)
    for got, exact, codec in ((m, m64, codec_m), (v, v64, codec_v)):
        wanted = encode(exact, codec)
        assert (got.q != wanted.q).sum() <= 1 + n // 500 and torch.equal(got.a, wanted.a)


def test_adamw_fp32_step_follows_torch():
    torch.manual_seed(0)
    start = torch.randn(50)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    mine, m, v = start.clone(), torch.zeros(50), torch.zeros(50)
    for step in range(1, 11):
        theirs.grad = torch.randn(50)
        optimizer.step()
        adamw_fp32_step(mine, theirs.grad, m, v, AdamWStep(0.01, 0.9, 0.95, 1e-8, 0.1, step))
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    assert torch.allclose(m, optimizer.state[theirs]["exp_avg"], rtol=1e-6, atol=1e-8)
    assert torch.allclose(v, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
def test_adamw_step_of_every_dtype_rounds_once(param_dtype, grad_dtype):
    param, grad, m, v, *codecs = problem(500, param=param_dtype, grad=grad_dtype)
    wide = param.float()
    m32, v32 = (type(x)(*(t.clone() for t in x)) for x in (m, v))
    adamw_step(param, grad, m, v, *codecs, NUMBERS)
    adamw_step(wide, grad.float(), m32, v32, *codecs, NUMBERS)
    assert param.dtype == param_dtype
    assert torch.equal(param, wide.to(param_dtype))
    assert torch.equal(m.q, m32.q) and torch.equal(v.q, v32.q)


@pytest.mark.parametrize("seed", [None, 7])
def test_adamw_step_in_chunks(monkeypatch, seed):
    whole, chunked = problem(3000), problem(3000)
    adamw_step(*whole, NUMBERS, seed)
    monkeypatch.setattr(adamw, "_CHUNK", 256)
    adamw_step(*chunked, NUMBERS, seed)
    assert equal([whole[0], *whole[2], *whole[3]], [chunked[0], *chunked[2], *chunked[3]])


def test_adamw_step_temporaries(monkeypatch):
    """The largest tensor that a step creates is one chunk."""
    monkeypatch.setattr(adamw, "_CHUNK", 1024)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                largest = max(largest, out.numel())
            return out

    arguments = problem(20_000)
    with Watch():
        adamw_step(*arguments, NUMBERS, 3)
    assert 0 < largest <= 1024


def test_adamw_step_with_a_seed():
    runs = [problem(2000) for _ in range(3)]
    for run, seed in zip(runs, (1, 1, 2), strict=True):
        adamw_step(*run, NUMBERS, seed)
    assert torch.equal(runs[0][2].q, runs[1][2].q)
    assert not torch.equal(runs[0][2].q, runs[2][2].q)
    assert torch.equal(runs[0][0], runs[2][0])  # the update itself precedes rounding


def test_adamw_step_of_nan():
    param, grad, m, v, *codecs = problem(512)
    grad[200] = math.nan
    adamw_step(param, grad, m, v, *codecs, NUMBERS)
    assert param[200].isnan() and param[:200].isfinite().all() and param[201:].isfinite().all()
    decoded = decode(m, codecs[0]).view(-1, 128)
    assert decoded[1].isnan().all() and decoded[0].isfinite().all() and decoded[2:].isfinite().all()


interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, by which the interpreter computes, warns where a kernel divides by zero."""


@pytest.fixture
def edges():
    pytest.importorskip("triton")
    from . import adamw_edges

    return adamw_edges


@pytest.fixture
def plain():
    pytest.importorskip("triton")
    from . import adamw_plain

    return adamw_plain


@interpreted
@pytest.mark.parametrize("n", on_device([1, 129, 1025, 1_000_003], [128 * 21 + 1]))
@pytest.mark.parametrize("variant", problems.VARIANTS)
def test_kernel_agrees_with_the_definition(agreement, variant, n):
    agreement.check(n, DEVICE, **problems.VARIANTS[variant])


@interpreted
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1023, 1024, 1025])
def test_kernel_on_lengths_around_groups_and_tiles(agreement, n):
    agreement.check(n, DEVICE)


SOME = (
    *(
        "default",
        "e5m2",
        "groups of 64",
        "bf16",
        "lr tensor",
        "int8, log8",
        "remainder, copy, stochastic",
    ),
    *("normalized, stochastic", "normalized, int8, log8, stochastic"),
)


@interpreted
@pytest.mark.parametrize("variant", on_device(tuple(problems.VARIANTS), SOME))
def test_many_tensors_in_one_launch(agreement, variant):
    agreement.check_many(DEVICE, **problems.VARIANTS[variant])


@interpreted
def test_kernel_on_non_finite_gradients(edges):
    edges.check_non_finite(DEVICE)
    edges.check_non_finite_moments(DEVICE)


@interpreted
def test_extreme_moments_survive_the_kernel(edges):
    edges.check_extremes(DEVICE)


@interpreted
def test_int8_and_log8_codes_survive_the_kernel(edges):
    edges.check_codes_survive(DEVICE)


@interpreted
def test_amaxes_survive_the_kernel(edges):
    edges.check_amaxes_stay(DEVICE, every=on_device(1, 127))


@interpreted
def test_largest_codes_do_not_wrap_around_in_the_kernel(edges):
    edges.check_largest_codes(DEVICE)


@interpreted
def test_kernel_on_the_smallest_normal_numbers(edges):
    edges.check_smallest_normals(DEVICE)


@interpreted
@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_a_remainder_keeps_the_fp32_master_to_the_bit_in_the_kernel(plain, grad, seed):
    for n in on_device((1, 129, 128 * 21 + 1, 1_000_003), (128 * 21 + 1,)):
        plain.check_remainder(DEVICE, seed=seed, grad=grad, n=n)


@interpreted
def test_every_master_is_divided_as_defined_by_the_kernel(plain):
    plain.check_split(DEVICE, every=on_device(1, 61))


@pytest.mark.parametrize("lr", ["number", "tensor"])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "param, grad", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_fp32_moments_of_many_tensors_are_those_of_the_definition(plain, param, grad, maximize, lr):
    lr = torch.tensor(0.01, device=DEVICE) if lr == "tensor" else 0.01
    plain.check_fp32_steps(DEVICE, getattr(torch, param), getattr(torch, grad), maximize, lr)


@pytest.mark.parametrize(("param", "low"), [("float32", False), ("bfloat16", True)])
def test_fp32_moments_with_remainders_and_copies(plain, param, low):
    plain.check_fp32_steps(DEVICE, getattr(torch, param), low=low, copy=torch.bfloat16)


FP32_KERNEL = {
    "default": {},
    "bf16 gradients": {"grad": torch.bfloat16},
    "remainder, copy": {"param": torch.bfloat16, "low": True, "copy": torch.bfloat16},
    "fp16": {"param": torch.float16, "grad": torch.float16},
    "maximize": {"maximize": True, "lr": 0.05},
    "counted on the device": {"counted": True, "step": 12},
}


@interpreted
@pytest.mark.parametrize("variant", FP32_KERNEL)
def test_the_kernel_of_fp32_moments_agrees_with_the_definition(plain, variant):
    plain.check_fp32_kernel(DEVICE, **FP32_KERNEL[variant])


@interpreted
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.98), (0.0, 0.5)])
def test_numbers_computed_on_the_device_have_the_bits_of_the_hosts(plain, betas):
    from coat_dist.kernels.adamw_numbers import numbers_of_counts

    steps = [1, 2, 3, 7, 100, 1023, 4097, 99_999, 2**24]
    found = numbers_of_counts(
        [torch.tensor(float(t), device=DEVICE) for t in steps],
        AdamWStep(3e-4, *betas, 1e-8, 0.1, 1),
    )
    for row, step in zip(found.cpu(), steps, strict=True):
        one = AdamWStep(3e-4, *betas, 1e-8, 0.1, step)
        wanted = (
            one.lr * one.inverse_bias1,
            one.inverse_bias1,
            one.inverse_sqrt_bias2,
            float(step),
        )
        assert torch.equal(row, torch.tensor(wanted, dtype=torch.float64).float()), step
        assert math.isclose(one.inverse_bias1, 1 / (1 - betas[0] ** step), rel_tol=1e-9)
