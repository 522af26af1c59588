"""All experts at once against one expert after the other: the same bits, and no number of tokens
is special.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, grouped_mlp, mlp, scale_rows
from tests.support import equal

from .saved_bytes import saved

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
    return [
        t.to(dtype).requires_grad_() for t in (x, probs, w1.view(H, -1), w2.view(-1, H))
    ], dout.to(dtype)


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
def test_grouped_mlp_has_the_bits_of_one_expert_after_the_other(counts, activation, options):
    settings = ActivationConfig(**options)
    inputs, dout = problem(counts, activation)
    x, probs, w1, w2 = inputs
    y = grouped_mlp(x, torch.tensor(counts), w1, w2, activation, settings, probs)
    grads = torch.autograd.grad(y, inputs, dout)
    expected = one_by_one(counts, *inputs, activation, settings)
    assert y.dtype == expected.dtype
    assert equal((y, *grads), (expected, *torch.autograd.grad(expected, inputs, dout)))


def test_grouped_mlp_into_main_grad():
    """The product in fp32, added or written: without ``main_grad`` it is rounded to BF16."""
    counts = torch.tensor(COUNTS["any"])
    (x, probs, *weights), dout = problem(COUNTS["any"])

    def run(wgrad):
        config = ActivationConfig(wgrad=wgrad)
        grouped_mlp(x, counts, *weights, "swiglu", config, probs).backward(dout)

    run("grad")
    rounded = [w.grad for w in weights]
    found = []
    for overwrite in (True, False):
        for w in weights:
            w.grad, w.main_grad = None, torch.ones_like(w, dtype=torch.float32)
            w.overwrite_main_grad = overwrite
        run("main_grad")
        assert all(w.grad is None for w in weights)
        found.append([w.main_grad for w in weights])
    for grad, written, added in zip(rounded, *found, strict=True):
        assert torch.equal(written.bfloat16(), grad) and not torch.equal(written, grad.float())
        assert torch.equal(added, 1 + written)


def test_grouped_mlp_saved_bytes():
    """What docs/flow.md says, for 96 rows of which 71 are tokens."""
    counts, settings = [5, 0, 33, 32, 1], ActivationConfig()
    (x, probs, w1, w2), _ = problem(counts)

    def call():
        return grouped_mlp(x, torch.tensor(counts), w1, w2, "swiglu", settings, probs)

    kept = saved(call, w1, w2, probs)
    rows, groups = 160, -(-F // settings.group_size)
    expected = (
        rows * (H + 2 * F + 2 * groups + H + -(-H // settings.group_size))
        + 4 * rows
        + 4 * sum(counts)
    )
    assert sum(kept.values()) == expected + 4 * rows // 32 + 4 * 5 + 4 * 4 * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": torch.zeros(71, H, dtype=torch.float16)},
            "x: got torch.float16, accepted: torch.bfloat16, torch.float32",
        ),
        (
            {"fc2_weight": torch.zeros(5 * 16, H)},
            "fc2_weight: got 5120 elements, accepted: 30720/2",
        ),
        (
            {"tokens_per_expert": torch.tensor([1, 2, 3, 4, 5])},
            r"tokens_per_expert: got \[1, 2, 3, 4, 5\], accepted",
        ),
        (
            {"settings": ActivationConfig(tp_invariant=True)},
            "tp_invariant: got true, accepted: false",
        ),
        ({"probs": torch.zeros(3)}, r"probs: got shape \[3\], accepted: \[71\]"),
    ],
)
def test_grouped_mlp_refuses_misfits(changes, message):
    (x, probs, w1, w2), _ = problem(COUNTS["any"])
    given = dict(
        x=x,
        tokens_per_expert=torch.tensor(COUNTS["any"]),
        fc1_weight=w1,
        fc2_weight=w2,
        activation="swiglu",
        settings=ActivationConfig(),
        probs=probs,
    )
    with pytest.raises(ValueError, match=message):
        grouped_mlp(**given | changes)
