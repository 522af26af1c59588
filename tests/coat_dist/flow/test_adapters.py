"""Low-rank adapters of the flow's products: the term they add, its gradients, what is saved."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_dist.flow import Adapter, Norm, linear, mlp, norm_linear, norm_mlp
from tests.support import equal

from .common import ONE, settings
from .saved_bytes import saved

ROWS, H, SIZES = 48, 64, (32, 48, 16)  # of several weights of one product


class Case:
    """A function of the flow with frozen weights, and adapters of its first and last product."""

    def __init__(self, name, dropout=0.0, **changes):
        self.name, self.config = name, settings(**changes)
        gated = "mlp" in name
        rows = (96, 96) if gated else (H,) if name == "linear" else SIZES
        self.weights = [torch.randn(n, H) * H**-0.5 for n in rows]
        self.last = torch.randn(H, 96) * 0.1
        self.norm = None
        if "norm" in name:
            self.norm = Norm("rmsnorm", 1e-5, torch.rand(H) + 0.5)

        def adapter(out, columns, r, scale=2.0):
            a, b = torch.randn(r, columns) * columns**-0.5, torch.randn(out, r) * 0.3
            return Adapter(a.requires_grad_(), b.requires_grad_(), scale, dropout)

        # Two on the first weight, and with several none on the second.
        several = [[] for _ in rows]
        several[0] = [adapter(rows[0], H, 4), adapter(rows[0], H, 3, 0.5)]
        if len(rows) > 1:
            several[-1] = [adapter(rows[-1], H, 5)]
        if name == "mlp without fc1":
            several = []
        self.first, self.second = several, [[adapter(H, 96, 4)]] if gated else []

    @property
    def pairs(self):
        return [t for of in (*self.first, *self.second) for one in of for t in one[:2]]

    def __call__(self, x, adapted=True):
        first, second = (self.first, self.second) if adapted else ((), ())
        if self.name == "linear":
            return linear(x, self.weights[0], ONE, self.config, adapters=first)
        if "mlp" not in self.name:
            return norm_linear(x, self.norm, self.weights, None, ONE, self.config, first)
        given = self.weights, self.last, "swiglu", ONE, self.config
        both = {"fc1_adapters": first, "fc2_adapters": second}
        return norm_mlp(x, self.norm, *given, **both) if self.norm else mlp(x, *given, **both)

    def plain(self, x):
        """By the definition, in fp64; and the leaves of its gradients."""
        leaves = [t.detach().double().requires_grad_() for t in self.pairs]
        pairs = iter(leaves)

        def product(x, weight, adapters):
            y = x @ weight.double().t()
            for one in adapters:
                y = y + one.scale * (x @ next(pairs).t()) @ next(pairs).t()
            return y

        x = x.detach().double().requires_grad_()
        y = x
        if self.norm is not None:
            y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.norm.weight.double()
        first = self.first or [[] for _ in self.weights]
        outs = [product(y, w, own) for w, own in zip(self.weights, first, strict=True)]
        if "mlp" not in self.name:
            return torch.cat(outs, -1), [x, *leaves]
        a = torch.nn.functional.silu(outs[0]) * outs[1]
        return product(a, self.last, self.second[0]), [x, *leaves]


def representable(*shape):
    """Values that FP8 holds, whatever the scale."""
    return torch.randint(-8, 9, shape).float()


LINEARS = "linear", "norm_linear", "plain_linear"
ALL = *LINEARS, "norm_mlp", "mlp", "mlp without fc1"
MODES = [
    {"forward_scales": scales, "forward": forward}
    for scales, forward in (("row", "exact"), ("tensor", "exact"), ("row", "quantized"))
]
MODES.append({"tiles": 2})  # MLPs with adapters run in one piece


def relative(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_adapters_by_their_definition(name, mode):
    case, x = Case(name, **mode), representable(2, ROWS // 2, H).requires_grad_()
    out, (wanted, leaves) = case(x), case.plain(x)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, [x, *case.pairs], upstream)
    expected = torch.autograd.grad(wanted, leaves, upstream.double())
    assert relative(out, wanted) < 0.06
    exact = name in LINEARS
    for got, grad in zip(found[1:], expected[1:], strict=True):
        assert relative(got, grad) < (1e-5 if exact else 0.12)
    assert relative(found[0], expected[0]) < 0.12
    if exact:
        # The FP8 product is the one without adapters, and so is its part of the gradient.
        base = case(x, adapted=False)
        (dx,) = torch.autograd.grad(base, x, upstream)
        pairs = [p.detach().clone() for p in case.pairs]
        for p in case.pairs[1::2]:
            p.data.zero_()
        assert torch.equal(case(x), base)
        frozen, grads = case.plain(x)
        for p, before in zip(case.pairs, pairs, strict=True):
            p.data.copy_(before)
        assert relative((out - base).double(), wanted - frozen) < 1e-4
        (plain,) = torch.autograd.grad(frozen, grads[:1], upstream.double())
        assert relative((found[0] - dx).double(), expected[0] - plain) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", LINEARS)
def test_gradients_are_those_of_the_same_dropout(name, dropout, dtype):
    """The term is linear in A, in B and in x: gradient times operand is one number for all."""
    case, x = Case(name, dropout), representable(ROWS, H).to(dtype).requires_grad_()
    case.first = [own[:1] for own in case.first]
    out, base = case(x), case(x, adapted=False)
    upstream = torch.randn_like(out)
    dx, *grads = torch.autograd.grad(out, [x, *case.pairs], upstream)
    (dx_base,) = torch.autograd.grad(base, x, upstream)
    wanted = ((out - base).double() * upstream).sum()
    size = ((out - base).double() * upstream).norm()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for part in (0, 1):
        own = zip(case.pairs[part::2], grads[part::2], strict=True)
        assert abs(sum((p.double() * g).sum() for p, g in own) - wanted) < tolerance * size
    if case.norm is None:
        assert abs(((dx - dx_base).double() * x).sum() - wanted) < tolerance * size


def test_dropout_of_adapters():
    case, x = Case("plain_linear"), torch.rand(ROWS, H) + 1
    case.weights = [torch.zeros(H, H)]
    case.first = [[Adapter(torch.eye(H), torch.eye(H), 2.0, 0.25)]]
    torch.manual_seed(5)
    out, other = case(x), case(x)
    kept = out != 0
    assert not torch.equal(kept, other != 0)
    assert (out - kept * x * 2 / 0.75).abs().max() < 1e-5
    assert abs(kept.float().mean() - 0.75) < 0.05
    torch.manual_seed(5)
    assert torch.equal(case(x), out)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_checkpointed_adapters(name, reentrant):
    case, x = Case(name, 0.3), torch.randn(ROWS, H, requires_grad=True)

    def gradients(run):
        torch.manual_seed(3)
        run().square().sum().backward()
        found = [t.grad.clone() for t in (x, *case.pairs)]
        for t in (x, *case.pairs):
            t.grad = None
        return found

    plain = gradients(lambda: case(x))
    assert equal(gradients(lambda: checkpoint(case, x, use_reentrant=reentrant)), plain)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ALL)
def test_saved_with_adapters(name, dropout):
    """Columns of x A' and the joined adapters; of x a byte an element, where a norm or attention
    saves it not already.
    """
    case, x = Case(name, dropout), torch.randn(ROWS, H, requires_grad=True)
    known = x, *case.weights, case.last, *([case.norm.weight] if case.norm else ())
    without = sum(saved(lambda: case(x, adapted=False), *known).values())
    rank, elements = 0, 0
    for products in (case.first, case.second):
        own = sum(len(one.a) for of in products for one in of)
        rank += own
        if own:
            width = 96 if products is case.second else H
            out = sum(w.shape[0] for w in case.weights) if products is case.first else H
            elements += own * (width + out)
    expected = 4 * (ROWS * rank + elements)
    if dropout:
        expected += 16 * (bool(case.first) + bool(case.second))
    if name in ("plain_linear", "mlp"):
        expected += ROWS * (H + 4)
    found = sum(saved(lambda: case(x), *known).values())
    assert found - without == expected


def test_frozen_first_halves():
    case, x = Case("mlp"), torch.randn(ROWS, H, requires_grad=True)
    out = case(x)
    for a in case.pairs[::2]:
        a.requires_grad_(False)
    (wanted,) = torch.autograd.grad(out, x, torch.ones_like(out))
    out = case(x)
    dx, *grads = torch.autograd.grad(out, [x, *case.pairs[1::2]], torch.ones_like(out))
    assert torch.equal(dx, wanted) and all(g.any() for g in grads)


@pytest.mark.parametrize("name", ALL)
def test_fp32_adapters_beside_a_bf16_base(name):
    case, x = Case(name), torch.randn(ROWS, H, dtype=torch.bfloat16, requires_grad=True)
    out = case(x)
    upstream = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [x, *case.pairs], upstream)
    for of in (*case.first, *case.second):
        of[:] = [
            one._replace(**{k: getattr(one, k).detach().bfloat16().requires_grad_() for k in "ab"})
            for one in of
        ]
    found = torch.autograd.grad(rounded := case(x), [x, *case.pairs], upstream)
    assert torch.equal(rounded, out) and rounded.dtype == x.dtype
    assert equal([g.to(x.dtype) for g in wanted], found)


@pytest.mark.parametrize("kind", ["rates", "norm"])
def test_adapters_that_are_refused(kind):
    case, x = Case("norm_linear"), torch.randn(ROWS, H)
    accepted = "an rmsnorm"
    if kind == "rates":
        case.first[-1] = [case.first[-1][0]._replace(dropout=0.5)]
        accepted = "one rank, one dropout"
    else:
        case.norm = Norm("layernorm", 1e-5, torch.ones(H))
    with pytest.raises(ValueError, match=f"^adapters: got .*, accepted: {accepted}"):
        case(x)
