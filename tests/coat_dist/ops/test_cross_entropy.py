"""Statistics and gradient of blocks of logits against fp64. That the bits are the same however
columns are cut into blocks: ``tests/coat_dist/flow/test_linear_loss.py``.
"""

import math

import pytest
import torch

from coat_dist.reference import cross_entropy as ce

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def log_sum(exponent, total):
    return total.log() + exponent.double() * math.log(2)


@DTYPES
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e5])
def test_logit_stats_against_fp64(dtype, size):
    logits, labels = (torch.randn(6, 501) * size).to(dtype), torch.randint(0, 501, (6,))
    exponent, total, label = ce.logit_stats(logits, labels, 0)
    assert torch.equal(label, logits[range(6), labels].float())
    # Rounding of single exponentials, and nothing that grows with the logits.
    assert (log_sum(exponent, total) - logits.double().logsumexp(-1)).abs().max() < 2e-7
    boost, dloss = torch.rand(6) + 0.5, torch.randn(6)
    grad = ce.logit_grad(logits, labels, 0, exponent, total.reciprocal().float(), boost, dloss)
    wanted = logits.double().softmax(-1) * boost[:, None] - torch.nn.functional.one_hot(labels, 501)
    torch.testing.assert_close(
        grad.double(),
        wanted * dloss[:, None],
        rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-6,
    )


def test_logit_stats_of_non_finite_logits():
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[0.0, -inf], [nan, 0.0], [inf, 0.0], [-inf, -inf], [-inf, 700.0]])
    exponent, total, label = ce.logit_stats(logits, torch.tensor([0, 1, 0, 5, -100]), 0)
    assert total.isnan().tolist() == [False, True, True, False, False] and total[3] == 0
    assert label.tolist() == [0, 0, inf, 0, 0]
    merged = ce.merge(
        torch.stack([exponent, exponent + 3]), torch.stack([total, torch.ones_like(total)])
    )
    # Never hidden by another block.
    assert merged[1].isnan().tolist() == [False, True, True, False, False]
    grad = ce.logit_grad(
        logits, torch.zeros(5).long(), 0, exponent, total.reciprocal().float(), None, torch.ones(5)
    )
    assert (
        grad[0].tolist() == [0, 0]
        and grad[1:4].isnan().all()
        and grad[4].tolist() == pytest.approx([-1, 1])
    )


def test_logit_stats_of_huge_logits():
    logits = torch.tensor([[2e38, -2e38], [-2e38, -2e38], [1e7, 1e7], [3e-45, 0.0]])
    exponent, total, _ = ce.logit_stats(logits, torch.zeros(4).long(), 0)
    error = (log_sum(exponent, total) - logits.double().logsumexp(-1)).abs()
    assert (error <= 2.0**-22 * logits.double().abs().amax(-1) + 1e-7).all()


def test_pow2_values():
    n = torch.arange(-1100, 1).float()
    wanted = torch.tensor(
        [2.0**k if k >= -1022 else 0.0 for k in range(-1100, 1)], dtype=torch.float64
    )
    assert torch.equal(ce.pow2(n), wanted)
    assert ce.pow2(torch.tensor([-torch.inf, -1e30])).tolist() == [0, 0]
