"""linear_cross_entropy against the loss of all logits: same value, same gradients, none of the
memory.
"""

import pytest
import torch
import torch.nn.functional as F

from coat_dist.flow import invariant_linear, linear_cross_entropy, vocab_parallel_cross_entropy
from coat_dist.flow.blocks import loss
from tests.support import Largest, equal

from .common import ONE, relative_error
from .saved_bytes import saved

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-3}
"""Relative error of dx, which is summed in fp32: now and then an element of BF16 is the neighbour,
and a large one (2**-7 beside a norm of about 14) alone makes 6e-4.
"""


def problem(dtype, s=13, b=5, h=72, v=331, bias=False):
    x, weight = torch.randn(s, b, h).to(dtype), (2 * torch.randn(v, h) * h**-0.5).to(dtype)
    labels = torch.randint(0, v, (b, s)).t()  # not contiguous
    labels[0, 1] = labels[-1, -1] = -100
    leaves = [x, weight]
    if bias:
        leaves.append(torch.randn(v).to(dtype))
        leaves[2][100:250] = -torch.inf  # whole chunks that count for nothing
    return [t.requires_grad_() for t in leaves], labels, torch.randn(s, b)


def plain(x, weight, bias, labels, z_loss=0.0):
    return vocab_parallel_cross_entropy(F.linear(x, weight, bias), labels, ONE, z_loss=z_loss)


def both(leaves, labels, upstream, **options):
    """(loss, gradients) of the plain path and of ours, for a gradient that differs from token to
    token.
    """
    z_loss = options.get("z_loss", 0.0)
    bias = leaves[2] if len(leaves) > 2 else None
    results = []
    for out in (
        plain(*leaves[:2], bias, labels, z_loss),
        linear_cross_entropy(*leaves[:2], labels, ONE, bias=bias, **options),
    ):
        assert out.dtype == torch.float32 and out.shape == labels.shape
        grads = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        assert equal(torch.autograd.grad(out, leaves, upstream), grads)
        results.append((out.detach(), grads))
    return results


@DTYPES
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [None, 64, 320, 7, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_is_the_loss_of_all_logits(dtype, chunk, bias, z_loss):
    leaves, labels, upstream = problem(dtype, bias=bias)
    (expected, wanted), (got, grads) = both(leaves, labels, upstream, chunk=chunk, z_loss=z_loss)
    _, (kept, of_kept) = both(leaves, labels, upstream, chunk=chunk, z_loss=z_loss, keep=True)
    assert torch.equal(got, kept) and equal(grads, of_kept)
    whole = chunk is None or chunk > 331
    # fp32 products may be summed in another order where the shape is another.
    if whole or dtype == torch.bfloat16:
        assert torch.equal(got, expected) and torch.equal(grads[1], wanted[1])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
    assert not got[0, 1] and not got[-1, -1] and not grads[0][0, 1].any()
    for mine, theirs in zip(grads, wanted, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert relative_error(mine, theirs) <= BOUND[dtype]
    if whole and dtype == torch.float32:
        assert torch.equal(grads[0], wanted[0])


@pytest.mark.parametrize("scale", [1.0, 0.125, -2])
@pytest.mark.parametrize("softcap", [0.0, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_linear_cross_entropy_of_scaled_and_capped_logits_against_fp64(scale, softcap, keep):
    leaves, labels, upstream = problem(torch.float32, bias=True)
    leaves[2].data[100:250] = -40.0
    options = {"scale": scale, "softcap": softcap, "z_loss": 1e-2, "chunk": 64, "keep": keep}
    wide = [t.detach().double().requires_grad_() for t in leaves]
    logits = scale * F.linear(*wide)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_sum = logits.logsumexp(-1)
    wanted = log_sum - logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    wanted = (wanted + 1e-2 * log_sum.square()).masked_fill(labels < 0, 0.0)
    got = linear_cross_entropy(*leaves[:2], labels, ONE, bias=leaves[2], **options)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    truth = torch.autograd.grad(wanted, wide, upstream.double())
    for mine, exact in zip(torch.autograd.grad(got, leaves, upstream), truth, strict=True):
        assert relative_error(mine, exact) <= 1e-5


@DTYPES
@pytest.mark.parametrize("chunk", [None, 64, 50, 7])
def test_linear_cross_entropy_exact_has_the_same_bits_for_every_chunk(dtype, chunk):
    leaves, labels, upstream = problem(dtype)
    wanted = vocab_parallel_cross_entropy(invariant_linear(*leaves, ONE), labels, ONE)
    got = linear_cross_entropy(*leaves, labels.int(), ONE, chunk=chunk, exact=True)
    assert torch.equal(got, wanted)
    assert equal(*(torch.autograd.grad(t, leaves, upstream) for t in (got, wanted)))


@pytest.mark.parametrize("exact", [False, True])
def test_linear_cross_entropy_makes_no_tensor_of_tokens_by_vocabulary(exact, monkeypatch):
    monkeypatch.setattr(loss, "_BLOCK", 512 * 256)
    tokens, h, v = 512, 16, 4096
    x = torch.randn(tokens, h, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, h, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, v, (tokens,))
    with Largest() as ours:
        linear_cross_entropy(x, weight, labels, ONE, exact=exact).sum().backward()
    assert ours.elements == tokens * 256
    with Largest() as theirs:
        plain(x, weight, None, labels).sum().backward()
    assert theirs.elements == tokens * v


@pytest.mark.parametrize("keep", [False, True])
def test_linear_cross_entropy_saves_its_input_and_16_bytes_a_token(keep):
    (x, weight, bias), labels, _ = problem(torch.bfloat16, bias=True)
    kept = saved(
        lambda: linear_cross_entropy(x, weight, labels, ONE, bias=bias, chunk=50, keep=keep),
        *(x, weight, bias),
    )
    logits = 2 * len(weight) * keep
    # The labels themselves, an exponent and a sum.
    assert sum(kept.values()) == labels.numel() * (8 + 8 + logits)


@pytest.mark.parametrize("label", [-1, 331, 10**6])
def test_linear_cross_entropy_of_labels_outside_the_vocabulary(label):
    leaves, labels, upstream = problem(torch.float32)
    labels[3, 2] = label
    with pytest.raises(
        ValueError, match=f"labels: got {label}, accepted: 0 to 330, or -100 to ignore"
    ):
        linear_cross_entropy(*leaves, labels, ONE)
    # As on a GPU: no look.
    out = loss._LinearCrossEntropy.apply(
        *leaves, None, labels, ONE, 0.0, 100, False, False, (1.0, 0.0)
    )
    assert out.isnan().sum() == 1 and out[3, 2].isnan()
    dx, dweight = torch.autograd.grad(out, leaves, upstream)
    assert dx.isnan().all(-1).sum() == 1 and dx[3, 2].isnan().all() and dweight.isnan().any()


def test_linear_cross_entropy_of_nan():
    (x, weight), labels, upstream = problem(torch.float32)
    bad = x.detach().clone()
    bad[4, 4, 0] = torch.nan
    out = linear_cross_entropy(bad.requires_grad_(), weight, labels, ONE, chunk=100)
    assert out.isnan().sum() == 1 and out[4, 4].isnan()
    dx, dweight = torch.autograd.grad(out, [bad, weight], upstream)
    assert dx[4, 4].isnan().all() and dweight.isnan().any()


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_linear_cross_entropy_of_frozen_inputs(frozen):
    leaves, labels, upstream = problem(torch.float32, bias=True)
    (_, wanted), _ = both(leaves, labels, upstream)
    for i in frozen:
        leaves[i].requires_grad_(False)
    linear_cross_entropy(*leaves[:2], labels, ONE, bias=leaves[2], chunk=331).backward(upstream)
    for i, (leaf, g) in enumerate(zip(leaves, wanted, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, g)


X, W, L = torch.randn(3, 2, 8), torch.randn(10, 8), torch.zeros(3, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: linear_cross_entropy(X, W, L, ONE, bias=W[0]),
            r"bias: got torch.float32 \[8\], accepted: .* \[10\]",
        ),
        (
            lambda: linear_cross_entropy(X, W, L[:2], ONE),
            r"labels: got torch.int64 \[2, 2\], accepted: .* \[3, 2\]",
        ),
        (lambda: vocab_parallel_cross_entropy(X, L.float(), ONE), "labels: got torch.float32"),
        (
            lambda: linear_cross_entropy(X, W, L, ONE, softcap=-30),
            "softcap: got 1.0, -30, accepted",
        ),
        (lambda: linear_cross_entropy(X, W, L, ONE, chunk=0), "chunk: got 0, accepted: a positive"),
        (lambda: vocab_parallel_cross_entropy(X, L, ONE, z_loss=float("nan")), "z_loss: got nan"),
    ],
)
def test_linear_cross_entropy_refuses_misfits(call, message):
    with pytest.raises(ValueError, match=message):
        call()
