"""All experts at once against one expert after the other, and choices of a router against tokens
that were sorted before: the same bits, and no number of tokens is special.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import TensorParallel, grouped_mlp, mlp, routed_mlp, scale_rows
from tests.support import equal
from tests.support.activations import split, torch_activation

from .saved_bytes import saved

H, F = 64, 48
COUNTS = {
    "any": [5, 0, 33, 32, 1],
    "one": [0, 0, 40, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "last_empty": [64, 3, 7, 9, 0],
}


def problem(counts, activation="swiglu", dtype=torch.bfloat16, seed=0):
    """x, probs, weight1, weight2, and the gradient of the output.

    The largest number of all rows of x is the same, and of all rows of the gradient: then scales of
    rows, of experts and of the tensor are.
    """
    g = torch.Generator().manual_seed(seed)
    parts, experts, tokens = (2 if "glu" in activation else 1), len(counts), sum(counts)
    x, dout = torch.randn(2, tokens, H, generator=g).clamp(-4, 4)
    x[:, 1] = dout[:, 0] = 5
    probs = torch.rand(tokens, generator=g)
    w1 = torch.randn(experts, H, parts * F, generator=g) * H**-0.5
    w1 *= torch.rand(experts, 1, 1, generator=g).mul(4).exp()
    w2 = torch.randn(experts, F, H, generator=g) * F**-0.5
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
        out.append(y if probs is None else scale_rows(y, probs[first : first + n], settings))
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
    """Of gradients, without ``probs``; with them, of the output."""
    settings = ActivationConfig(**options)
    (x, probs, *weights), dout = problem(counts, activation)
    given = torch.tensor(counts)
    for p in (None, probs):
        y = grouped_mlp(x, given, *weights, activation, settings, p)
        expected = one_by_one(counts, x, p, *weights, activation, settings)
        assert torch.equal(y, expected)
        if p is None:
            inputs = x, *weights
            found = torch.autograd.grad(y, inputs, dout)
            for got, wanted in zip(found, torch.autograd.grad(expected, inputs, dout), strict=True):
                assert got.shape == wanted.shape and got.dtype == wanted.dtype
                assert torch.equal(got, wanted)


def exact(activation, x, index, probs, w1, w2, b1=None, b2=None):
    """Experts in the dtype of their arguments, weights ``[experts, out, in]``."""
    out = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(w1, w2, strict=True)):
        token, choice = (index == expert).nonzero(as_tuple=True)
        pre = x[token] @ up.t()
        if b1 is not None:
            pre = pre + b1[expert]
        y = torch_activation(activation, split(pre, activation)) @ down.t()
        if b2 is not None:
            y = y + b2[expert]
        out = out.index_add(0, token, y * probs[token, choice, None])
    return out


def routing(tokens, choices, experts, dropped=False):
    """x, a router's choices and their factors, weights ``[experts, out, in]``, gradient of y."""
    x, dout = torch.randn(2, tokens, H)
    x *= torch.rand(tokens, 1).mul(3).exp()
    w1 = (torch.randn(experts, 2 * F, H) * H**-0.5).bfloat16()
    w2 = (torch.randn(experts, H, F) * F**-0.5).bfloat16()
    probs, index = torch.rand(tokens, experts).topk(choices)
    if dropped:
        index[torch.rand(tokens, choices) < 0.3] = experts
        # The gradient's scale is that of all rows, also of tokens that no expert takes.
        dout[index.amin(1) == experts] = 0
    inputs = [t.requires_grad_() for t in (x.bfloat16(), probs.bfloat16(), w1, w2)]
    return inputs, index, dout.bfloat16()


@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
def test_routed_mlp_has_the_bits_of_tokens_sorted_before(dropped):
    """A token's codes and its gradient's travel; sums over its choices are rounded once."""
    settings = ActivationConfig()
    inputs, index, dout = routing(50, 3, 5, dropped)
    x, probs, w1, w2 = inputs
    y = routed_mlp(x, index, probs, w1, w2, "swiglu", settings)
    dx, dprobs, *dweights = torch.autograd.grad(y, inputs, dout)

    counts = index.flatten().bincount(minlength=6)[:5]
    order = index.flatten().argsort(stable=True)[: int(counts.sum())]
    taken = x[order // 3], probs.flatten()[order], *(w.transpose(1, 2) for w in (w1, w2))
    taken = [t.detach().contiguous().requires_grad_() for t in taken]
    x2, p2, *swapped = taken
    each = grouped_mlp(x2, counts, *swapped, "swiglu", settings)
    weighted = grouped_mlp(x2, counts, *swapped, "swiglu", settings, p2)
    dx2, dp2, *dswapped = torch.autograd.grad(weighted, taken, dout[order // 3])

    def sums(rows):
        out = torch.zeros(150, H)
        out[order] = rows
        first, second, third = out.view(50, 3, H).unbind(1)
        return (first + second + third).bfloat16()

    assert torch.equal(y, sums(each.float() * p2[:, None].float()))
    assert torch.equal(dx, sums(dx2.float()))
    assert torch.equal(dprobs.flatten()[order], dp2)
    assert dropped or index.max() < 5
    assert not dprobs[index == 5].any()
    for got, wanted in zip(dweights, dswapped, strict=True):
        assert torch.equal(got, wanted.transpose(1, 2))
    again = [t.detach().contiguous().requires_grad_() for t in (x, probs, *taken[2:])]
    y2 = routed_mlp(again[0], index, *again[1:], "swiglu", settings, transposed=True)
    assert torch.equal(y2, y)
    assert equal(torch.autograd.grad(y2, again[2:], dout), dswapped)


@pytest.mark.parametrize(
    "options",
    [{}, {"forward_scales": "tensor"}, {"forward": "quantized", "grad_format": "e5m2"}]
    + [{"format": "e5m2"}],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(300, 2, 4), (1, 1, 3), (0, 2, 3)])
@pytest.mark.parametrize("activation", ["swiglu", "interleaved_quick_geglu"])
def test_routed_mlp_is_near_the_exact_experts(activation, options, tokens, choices, experts):
    """The router's gradient too, whose rows need no saved output; the second with biases."""
    inputs, index, dout = routing(tokens, choices, experts)
    if activation != "swiglu":
        inputs[0].data.div_(8)  # few gates that rounding takes over their limit
        inputs += [torch.randn(experts, n).bfloat16().requires_grad_() for n in (2 * F, H)]
    settings = ActivationConfig(**options)
    x, probs, w1, w2, *biases = inputs
    y = routed_mlp(x, index, probs, w1, w2, activation, settings, False, *biases)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    wanted = exact(activation, doubles[0], index, *doubles[1:])
    found = zip(
        (y, *torch.autograd.grad(y, inputs, dout)),
        (wanted, *torch.autograd.grad(wanted, doubles, dout.double())),
        strict=True,
    )
    bound = 0.25 if "e5m2" in options.values() else 0.14
    if tokens == 1:  # of which a single number may be mostly rounding
        bound = torch.inf
    for got, exactly in found:
        assert got.dtype == torch.bfloat16 and got.isfinite().all()
        assert (got - exactly).norm() <= bound * exactly.norm()


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


@pytest.mark.parametrize("frozen", [False, True])
def test_grouped_mlp_saved_bytes(frozen):
    """What docs/flow.md says, for 160 rows of which 71 are tokens."""
    counts, settings = [5, 0, 33, 32, 1], ActivationConfig()
    (x, probs, w1, w2), _ = problem(counts)
    w1.requires_grad_(not frozen)

    def call():
        return grouped_mlp(x, torch.tensor(counts), w1, w2, "swiglu", settings, probs)

    kept = saved(call, w1, w2, probs)
    rows, groups = 160, -(-F // settings.group_size)
    tokens = sum(counts)
    of_x = tokens * (H + 4) + 4 * 5
    places = 4 * rows + 4 * tokens + 4 * rows // 32 + 4 * 5
    expected = rows * 2 * (F + groups) + places + 4 * 3 * 5
    assert sum(kept.values()) == expected + of_x * (not frozen)


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
