"""Cross entropy on one rank: torch's value and gradient, no copy of the logits kept, bad labels
refused.
"""

import pytest
import torch
import torch.nn.functional as F

from coat_dist.flow import vocab_parallel_cross_entropy
from coat_dist.flow.blocks import loss
from coat_dist.reference import cross_entropy

from .common import ONE
from .saved_bytes import saved


def reference(logits, labels, z_loss):
    exact = logits.double()  # once: gradients of two conversions would be rounded before their sum
    rows, log_sum = exact.flatten(0, -2), exact.logsumexp(-1)
    loss = F.cross_entropy(rows, labels.flatten(), reduction="none", ignore_index=-100)
    return loss.view(labels.shape) + (labels >= 0) * z_loss * log_sum**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [50, 2**24])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.3])
def test_vocab_parallel_cross_entropy_value_and_gradient(dtype, chunk, z_loss, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK", chunk)
    logits = (torch.randn(7, 3, 41) * torch.rand(7, 3, 1) * 60 - 20).to(dtype).requires_grad_()
    labels = torch.randint(0, 41, (7, 3))
    labels[2, 1] = labels[0, 0] = -100
    mine = vocab_parallel_cross_entropy(logits, labels, ONE, z_loss=z_loss)
    expected = reference(logits, labels, z_loss)
    assert mine.dtype == torch.float32 and mine.shape == labels.shape
    torch.testing.assert_close(mine, expected.float(), rtol=1e-6, atol=2e-6)
    weighting = torch.randn(7, 3)
    (a,) = torch.autograd.grad(mine, logits, weighting)
    (b,) = torch.autograd.grad(expected, logits, weighting.double())
    assert a.dtype == dtype
    # z-loss adds up to 2 * 0.3 * 40 times a probability, which may cancel the label's one.
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6 + 2e-5 * z_loss)
    assert not a[2, 1].any() and not a[0, 0].any() and mine[2, 1] == 0


def test_vocab_parallel_cross_entropy_saves_no_copy_of_the_logits():
    logits, labels = (
        torch.randn(8, 3, 1000, dtype=torch.bfloat16, requires_grad=True),
        torch.randint(0, 1000, (8, 3)),
    )
    kept = saved(lambda: vocab_parallel_cross_entropy(logits, labels, ONE), logits)
    assert sum(kept.values()) == 24 * (8 + 8)  # the labels themselves, a maximum and a sum


def test_vocab_parallel_cross_entropy_of_extremes():
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [-torch.inf, 0.0, 0.0], [torch.nan, 0.0, 0.0]], requires_grad=True
    )
    out = vocab_parallel_cross_entropy(logits, torch.tensor([0, 1, 1]), ONE)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.6931472, torch.nan]), equal_nan=True)
    out.sum().backward()
    torch.testing.assert_close(logits.grad[1], torch.tensor([0.0, -0.5, 0.5]))
    assert logits.grad[2].isnan().all()


@pytest.mark.parametrize("label", [-1, 5, -99, 10**6])
def test_vocab_parallel_cross_entropy_of_labels_outside_the_vocabulary(label):
    labels = torch.tensor([1, label])
    with pytest.raises(
        ValueError, match=f"labels: got {label}, accepted: 0 to 4, or -100 to ignore"
    ):
        vocab_parallel_cross_entropy(torch.randn(2, 5), labels, ONE)
    # Where looking would cost a synchronization the loss says it instead.
    logits = torch.randn(2, 5, requires_grad=True)
    out = loss._CrossEntropy.apply(logits, labels, ONE, 0.0)
    assert out.isnan().tolist() == [False, True]
    out.sum().backward()
    assert logits.grad[1].isnan().all() and logits.grad[0].isfinite().all()
