"""Experts in grouped products on a GPU: torch's grouped FP8 product against one product an
expert.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.devices import has_fp8
from coat_dist.flow import grouped_mlp
from coat_dist.kernels import gemm
from tests.coat_dist.flow.test_grouped import COUNTS, F, H, one_by_one, problem
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
    inputs, dout = on_gpu(counts)
    monkeypatch.setattr(gemm, "MUCH_WORK", 1024 * H * F)
    expected = run(lambda *t: one_by_one(counts, *t, "swiglu", settings), inputs, dout)
    for given in (torch.tensor(counts), torch.tensor(counts, device="cuda")):
        got = run(
            lambda x, p, w1, w2, n=given: grouped_mlp(x, n, w1, w2, "swiglu", settings, p),
            inputs,
            dout,
        )
        for a, b in zip(got, expected, strict=True):
            assert a.isfinite().all() and (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
    weights = got[3].view(len(counts), H, -1), got[4].view(len(counts), F, H)
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
