"""Experts in grouped products on a GPU: torch's grouped FP8 product against one product an
expert.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.devices import has_fp8
from coat_dist.flow import grouped_mlp, routed_mlp
from coat_dist.kernels import gemm
from tests.coat_dist.flow.test_grouped import (
    COUNTS,
    F,
    H,
    exact,
    one_by_one,
    problem,
    routing,
)
from tests.support.devices import ON_GPU, nothing_waits

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a GPU that runs kernels")


def run(function, inputs, dout):
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dout)]


def on_gpu(counts):
    inputs, dout = problem(counts)
    return [t.detach().cuda().requires_grad_() for t in inputs], dout.cuda()


@pytest.mark.parametrize(
    "counts",
    [*COUNTS.values(), [300, 17, 0, 999, 64], [3000, 17, 0, 999, 1700]],
    ids=[*COUNTS, "more", "many"],
)
@pytest.mark.parametrize(
    "options", [{}, {"forward_scales": "tensor"}, {"grad_format": "e5m2"}], ids=str
)
def test_one_expert_after_the_other(counts, options, monkeypatch):
    """Sums of tensor cores differ in their last bits, so FP8 codes may: 2 % of the norm;
    wherever numbers are known.
    """
    settings = ActivationConfig(**options)
    (x, _, *weights), dout = on_gpu(counts)
    inputs = x, *weights
    monkeypatch.setattr(gemm, "MUCH_WORK", 1024 * H * F)
    expected = run(lambda x, *w: one_by_one(counts, x, None, *w, "swiglu", settings), inputs, dout)
    for given in (torch.tensor(counts), torch.tensor(counts, device="cuda")):
        got = run(lambda x, *w, n=given: grouped_mlp(x, n, *w, "swiglu", settings), inputs, dout)
        for a, b in zip(got, expected, strict=True):
            assert a.isfinite().all() and (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
    weights = got[2].view(len(counts), H, -1), got[3].view(len(counts), F, H)
    for expert, n in enumerate(counts):
        assert all(bool(w[expert].any()) == (n > 0) for w in weights)


def test_torchs_grouped_product_is_taken_without_waiting(monkeypatch):
    """With numbers of tokens on the GPU nothing waits for it, in forward and backward."""
    if torch.cuda.get_device_capability() != (9, 0) or not has_fp8(torch.empty(0, device="cuda")):
        pytest.skip("grouped FP8 products are for compute capability 9.0")
    monkeypatch.setattr(gemm, "scaled_mm", None)
    counts = torch.tensor(COUNTS["any"], device="cuda")
    inputs, dout = on_gpu(COUNTS["any"])

    def call(x, p, w1, w2):
        return grouped_mlp(x, counts, w1, w2, "swiglu", ActivationConfig(), p)

    run(call, inputs, dout)
    with nothing_waits():
        run(call, inputs, dout)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(900, 4, 12), (3000, 2, 300)])
def test_routed_mlp_is_near_the_exact_experts(tokens, choices, experts):
    """Choices of a router, some of them dropped, without waiting for the GPU."""
    inputs, index, dout = routing(tokens, choices, experts, dropped=True)
    inputs = [t.detach().cuda().requires_grad_() for t in inputs]
    index, dout = index.cuda(), dout.cuda()

    def call(x, probs, *weights):
        return routed_mlp(x, index, probs, *weights, "swiglu", ActivationConfig())

    got = run(call, inputs, dout)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    wanted = run(lambda x, *rest: exact("swiglu", x, index, *rest), doubles, dout.double())
    for mine, exactly in zip(got, wanted, strict=True):
        assert (mine - exactly).norm() <= 0.11 * exactly.norm()
    with nothing_waits():
        run(call, inputs, dout)
