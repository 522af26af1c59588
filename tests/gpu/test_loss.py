"""Cross entropy on a GPU: chunks against all logits, peak memory, no host sync."""

import pytest
import torch
import torch.nn.functional as F

from coat_dist.flow import (
    TensorParallel,
    invariant_linear,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tests.coat_dist.flow.common import relative_error
from tests.support import equal
from tests.support.devices import nothing_waits

ONE = TensorParallel()


def problem(tokens=2048, h=512, v=32000, dtype=torch.bfloat16):
    x = torch.randn(tokens, h, device="cuda").to(dtype).requires_grad_()
    weight = (2 * torch.randn(v, h, device="cuda") * h**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (tokens,), device="cuda")
    labels[::100] = -100
    return x, weight, labels, torch.randn(tokens, device="cuda")


@pytest.mark.parametrize("chunk", [None, 4096, 4001])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_chunks_against_all_logits(chunk, z_loss):
    """The GEMM library may take another kernel for another shape: a logit may then be its BF16
    neighbour.
    """
    x, weight, labels, upstream = problem()
    expected = vocab_parallel_cross_entropy(F.linear(x, weight), labels, ONE, z_loss=z_loss)
    got = linear_cross_entropy(x, weight, labels, ONE, chunk=chunk, z_loss=z_loss)
    kept = linear_cross_entropy(x, weight, labels, ONE, chunk=chunk, z_loss=z_loss, keep=True)
    # A step of the largest label logits.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2.0**-4)
    assert (got - expected).abs().mean() < 1e-3 and not got[::100].any()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    logits = wide[0] @ wide[1].t()
    log_sum = logits.logsumexp(-1)
    true = (
        log_sum
        - logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
        + z_loss * log_sum.square()
    )
    true = torch.where(labels < 0, 0.0, true)
    truth = torch.autograd.grad(true, wide, upstream.double())
    plain = torch.autograd.grad(expected, [x, weight], upstream)
    chunked = torch.autograd.grad(got, [x, weight], upstream)
    of_kept = torch.autograd.grad(kept, [x, weight], upstream)
    assert torch.equal(kept, got) and equal(of_kept, chunked)
    for mine, theirs, exact in zip(chunked, plain, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine, exact) <= 1.05 * relative_error(theirs, exact) + 1e-5
        assert relative_error(mine, theirs) < 1e-2


def test_exact_products_give_the_same_bits_for_every_chunk():
    x, weight, labels, upstream = problem(tokens=128, h=64, v=3000)
    wanted = vocab_parallel_cross_entropy(invariant_linear(x, weight, ONE), labels, ONE)
    gradients = torch.autograd.grad(wanted, [x, weight], upstream)
    for chunk in (None, 1024, 333):
        out = linear_cross_entropy(x, weight, labels, ONE, chunk=chunk, exact=True)
        assert torch.equal(out, wanted)
        assert equal(torch.autograd.grad(out, [x, weight], upstream), gradients)


def test_peak_memory_has_one_chunk_of_logits():
    tokens, h, v, chunk = 4096, 256, 32000, 4096
    x, weight, labels, upstream = problem(tokens, h, v)

    def peak(loss):
        for _ in range(2):  # the first run allocates workspaces
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(loss(), [x, weight], upstream)
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: linear_cross_entropy(x, weight, labels, ONE, chunk=chunk))
    theirs = peak(lambda: vocab_parallel_cross_entropy(F.linear(x, weight), labels, ONE))
    # One chunk in BF16, dx in fp32 and BF16, dweight, and per token the statistics of every chunk.
    assert (
        ours
        < 2 * tokens * chunk + 6 * tokens * h + 2 * v * h + 12 * tokens * (v // chunk + 1) + 2**22
    )
    assert theirs > 4 * tokens * v  # logits and their gradient


def test_nothing_waits_for_the_gpu():
    x, weight, labels, upstream = problem()
    # Handles, workspaces.
    linear_cross_entropy(x, weight, labels, ONE, chunk=4096).backward(upstream)
    with nothing_waits():
        linear_cross_entropy(x, weight, labels, ONE, chunk=4096, z_loss=1e-4).backward(upstream)
    assert x.grad.isfinite().all()


def test_label_outside_the_vocabulary_is_nan():
    x, weight = torch.randn(4, 64, device="cuda"), torch.randn(300, 64, device="cuda")
    labels = torch.tensor([1, 300, -100, -1], device="cuda")
    out = linear_cross_entropy(x, weight, labels, ONE, chunk=100)
    assert out.isnan().tolist() == [False, True, False, True] and out[2] == 0
