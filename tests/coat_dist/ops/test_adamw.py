"""One AdamW step: against torch, against an fp64 oracle, and its memory."""

import pytest
import torch

from coat_dist.reference import adamw
from coat_dist.reference.adamw import (
    AdamWStep,
    AdamWTensors,
    FP32Tensors,
    adamw_fp32_step,
    adamw_step,
)
from coat_dist.reference.moments import MomentCodec, decode, encode
from tests.support import Largest, equal

from .adamw_problems import NUMBERS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    adamw_step(AdamWTensors(param, grad, m, v), codec_m, codec_v, h)
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
        numbers = AdamWStep(0.01, 0.9, 0.95, 1e-8, 0.1, step)
        adamw_fp32_step(FP32Tensors(mine, theirs.grad, m, v), numbers)
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)
    assert torch.allclose(m, optimizer.state[theirs]["exp_avg"], rtol=1e-6, atol=1e-8)
    assert torch.allclose(v, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
def test_adamw_step_of_every_dtype_rounds_once(param_dtype, grad_dtype):
    param, grad, m, v, *codecs = problem(500, param=param_dtype, grad=grad_dtype)
    wide = param.float()
    m32, v32 = (type(x)(*(t.clone() for t in x)) for x in (m, v))
    adamw_step(AdamWTensors(param, grad, m, v), *codecs, NUMBERS)
    adamw_step(AdamWTensors(wide, grad.float(), m32, v32), *codecs, NUMBERS)
    assert param.dtype == param_dtype
    assert torch.equal(param, wide.to(param_dtype))
    assert torch.equal(m.q, m32.q) and torch.equal(v.q, v32.q)


@pytest.mark.parametrize("seed", [None, 7])
def test_adamw_step_in_chunks(monkeypatch, seed):
    whole, chunked = problem(3000), problem(3000)
    adamw_step(AdamWTensors(*whole[:4], seed), *whole[4:], NUMBERS)
    monkeypatch.setattr(adamw, "_CHUNK", 256)
    adamw_step(AdamWTensors(*chunked[:4], seed), *chunked[4:], NUMBERS)
    assert equal([whole[0], *whole[2], *whole[3]], [chunked[0], *chunked[2], *chunked[3]])


def test_adamw_step_temporaries(monkeypatch):
    """The largest tensor that a step creates is one chunk."""
    monkeypatch.setattr(adamw, "_CHUNK", 1024)
    arguments = problem(20_000)
    with Largest() as made:
        adamw_step(AdamWTensors(*arguments[:4], 3), *arguments[4:], NUMBERS)
    assert 0 < made.elements <= 1024
