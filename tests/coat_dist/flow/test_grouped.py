"""All experts at once against one expert after the other: the same bits, and no number of tokens is special."""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, grouped_mlp, mlp, scale_rows

H, F = 64, 48
COUNTS = {
    "any": [5, 0, 33, 32, 1],
    "one": [0, 0, 40, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "last_empty": [64, 3, 7, 9, 0],
}


def problem(counts, activation="swiglu", dtype=torch.bfloat16, seed=0):
    """x, probs, weight1, weight2, and the gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    parts, experts, tokens = (2 if "glu" in activation else 1), len(counts), sum(counts)
    x = torch.randn(tokens, H, generator=g) * torch.rand(tokens, 1, generator=g).mul(9).exp()
    probs = torch.rand(tokens, generator=g)
    w1 = torch.randn(experts, H, parts * F, generator=g) * H**-0.5
    w1 *= torch.rand(experts, 1, 1, generator=g).mul(4).exp()
    w2 = torch.randn(experts, F, H, generator=g) * F**-0.5
    dout = torch.randn(tokens, H, generator=g)
    return [t.to(dtype).requires_grad_() for t in (x, probs, w1.view(H, -1), w2.view(-1, H))], dout.to(dtype)


def one_by_one(counts, x, probs, w1, w2, activation, settings):
    """The experts as SequentialMLP has them: weights [out, in]."""
    experts, out, first = len(counts), [], 0
    w1, w2 = w1.view(experts, H, -1), w2.view(experts, F, H)
    for e, n in enumerate(counts):
        fc1, fc2 = w1[e].t().contiguous(), w2[e].t().contiguous()
        y = mlp(x[first : first + n], fc1, fc2, activation, TensorParallel(), settings)
        out.append(scale_rows(y, probs[first : first + n], settings))
        first += n
    return torch.cat(out)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("swiglu", {}),
        ("swiglu", {"forward_scales": "tensor"}),
        ("geglu", {"forward_scales": "tensor", "forward": "quantized", "grad_format": "e5m2"}),
        ("gelu", {"forward": "quantized", "weights": "cached", "scale": "bf16"}),
    ],
    ids=["default", "tensor", "paper", "cached"],
)
def test_the_bits_of_one_expert_after_the_other(counts, activation, options):
    settings = ActivationConfig(**options)
    inputs, dout = problem(counts, activation)
    x, probs, w1, w2 = inputs
    y = grouped_mlp(x, torch.tensor(counts), w1, w2, activation, settings, probs)
    grads = torch.autograd.grad(y, inputs, dout)
    expected = one_by_one(counts, *inputs, activation, settings)
    for got, wanted in zip((y, *grads), (expected, *torch.autograd.grad(expected, inputs, dout)), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
