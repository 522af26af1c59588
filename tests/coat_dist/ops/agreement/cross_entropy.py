"""Cross entropy: an exponential may differ in the last bits of fp32 (2**f is the hardware's). What
must be exact is that results do not depend on how columns are cut into blocks.
"""

import itertools
import math

import torch

from coat_dist.reference.cross_entropy import merge
from tests.support.devices import DEVICE, on_device

from . import agree, compare, pair

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
"""The largest step to the neighbour, relative."""


def block(rows, columns, dtype):
    """Logits inside a wider buffer (rows are not adjacent), and labels, some of them of other
    blocks.
    """
    wide = torch.randn(rows, columns + 5) * 8
    # The largest comes last, in another block than the first ones.
    wide[::2] = wide[::2].sort(-1).values
    wide = wide.to(DEVICE, dtype)
    return wide[:, 2 : columns + 2], torch.randint(0, 3 * columns, (rows,)).to(DEVICE)


def log_sum(stats):
    return stats.total.log() + stats.exponent.double() * math.log(2)


def check_stats(rows, columns):
    for dtype in ULP:
        logits, labels = block(rows, columns, dtype)
        got, wanted = (f(logits, labels, columns) for f in pair("logit_stats"))
        assert [t.dtype for t in got] == [torch.float32, torch.float64, torch.float32]
        assert torch.equal(got.label, wanted.label)
        # Near the middle between two exponents either is right, and the mantissa makes up for it.
        assert (got.exponent - wanted.exponent).abs().max() <= 1
        assert torch.equal(got.exponent, got.exponent.round())
        # fp32 logits: without a fused multiply-add (interpreter) their product with log2(e) rounds.
        bound = 5e-7
        if dtype == torch.float32:
            bound += 2.0**-22 * logits.abs().max().item()
        assert (log_sum(got) - log_sum(wanted)).abs().max() <= bound


def check_extremes():
    inf, nan = torch.inf, torch.nan
    rows = [
        [1e4, -1e4, 0.0],
        [-inf, 0.0, 0.0],
        [nan, 0.0, 0.0],
        [inf, 0.0, 0.0],
        [-inf, -inf, -inf],
        [2e38, -2e38, 0.0],
        [2e38, 2e38, 2e38],
        [-2e38, -2e38, -2e38],
        [1e-39, -1e-45, 0.0],
        [-88.0, -89.0, -1000.0],
        [inf, -inf, nan],
        [2.0**22, 2.0**22, 0.0],
        [1e7, -1e7, 1e7],
        [700.0, 710.0, 720.0],
        [0.0, -103.0, -87.3],
        [8e6, -8.3e6, 0.5],
    ]
    logits = torch.tensor(rows, device=DEVICE)
    labels = torch.arange(len(rows), device=DEVICE) % 4 - 1
    got, wanted = (f(logits, labels, 0) for f in pair("logit_stats"))
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(got.label.nan_to_num(7), wanted.label.nan_to_num(7))
    a, b, true = log_sum(got), log_sum(wanted), logits.double().logsumexp(-1)
    fine = true.isfinite()
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(
        a[fine].isfinite(), true[fine].isfinite()
    )
    bound = 3e-7 + 2.0**-22 * logits[fine].double().abs().amax(-1)
    assert ((b[fine] - true[fine]).abs() <= bound).all() and (
        (a[fine] - true[fine]).abs() <= 2 * bound
    ).all()
    ones = torch.ones(len(rows), device=DEVICE)
    inverse = wanted.total.reciprocal().float()
    rest = labels, 0, wanted.exponent, inverse, None, ones
    a, b = (f(logits, *rest) for f in pair("logit_grad"))
    assert torch.equal(a.isnan(), b.isnan())
    assert b[2:5].isnan().all() and b[:2].isfinite().all()
    ordinary = logits.abs().amax(-1) <= 2.0**22
    compare(a[ordinary], b[ordinary], rtol=1e-2, atol=1e-6)


def check_blocks(*cuts):
    """Cut into blocks, merged: the same exponent, the same loss, and the same gradient, to the
    bit.
    """
    (kernel, _), (grad, _), columns = pair("logit_stats"), pair("logit_grad"), cuts[-1]
    for dtype in ULP:
        logits, labels = block(4, columns, dtype)
        labels = labels.remainder(columns)
        logits[3, :150] = -torch.inf  # nothing in two of the blocks
        whole = kernel(logits, labels, 0)
        pairs = list(itertools.pairwise(cuts))
        parts = [kernel(logits[:, a:b], labels, a) for a, b in pairs]
        exponent, total = merge(*(torch.stack([p[i] for p in parts]) for i in (0, 1)))
        assert torch.equal(exponent, whole.exponent)
        assert ((total - whole.total).abs() <= 2.0**-48 * whole.total).all()
        assert torch.equal(sum(p.label for p in parts), whole.label)
        inverse, ones = whole.total.reciprocal().float(), torch.rand(4, device=DEVICE)
        rest = (exponent, inverse, None, ones)
        grads = [grad(logits[:, a:b], labels, a, *rest) for a, b in pairs]
        assert torch.equal(torch.cat(grads, 1), grad(logits, labels, 0, *rest))


def check_grad(rows, columns):
    kernel, definition = pair("logit_grad")
    for dtype, boosted in itertools.product(ULP, (False, True)):
        logits, labels = block(rows, columns, dtype)
        stats = pair("logit_stats")[1](logits, labels, columns)
        inverse = stats.total.reciprocal().float()
        boost = torch.rand(rows, device=DEVICE) + 0.5 if boosted else None
        dloss = torch.randn(rows, device=DEVICE)
        rest = (labels, columns, stats.exponent, inverse, boost, dloss)
        wanted = definition(logits, *rest)
        garbage = torch.full_like(wanted, torch.nan)
        assert kernel(logits, *rest, out=garbage) is garbage
        at_label = labels[:, None] - columns == torch.arange(logits.shape[1], device=DEVICE)
        size = wanted.float().abs() + dloss[:, None].abs() * at_label
        drift = 1e-6 if dtype == torch.bfloat16 else 1e-5  # see check_stats
        off = (garbage.float() - wanted.float()).abs()
        assert (off <= (drift + ULP[dtype]) * size + 1e-38).all()
        # The interpreter cuts BF16 off, it does not round.
        if DEVICE != "cpu" and dtype == torch.bfloat16:
            assert (garbage != wanted).float().mean() < 1e-3 + 3 / wanted.numel()
        assert kernel(logits, *rest, out=logits) is logits
        assert torch.equal(logits, garbage)  # in place: the same bits
        turned = torch.full((columns, rows), torch.nan, dtype=dtype, device=DEVICE).t()
        assert kernel(garbage.zero_(), *rest, out=turned) is turned
        assert turned.isfinite().all()


def check_transform(rows, columns, *transform):
    """Logits of raw products: the label and the sums of both, and gradients through tanh."""
    for dtype in ULP:
        raw, labels = block(rows, columns, dtype)
        raw[0, :2] = torch.tensor([-torch.inf, torch.inf] if transform[1] else [-1e30, -1e29])
        labels[0] = columns + 2
        got, wanted = agree("logit_stats", raw, labels, columns, *transform, rtol=torch.inf)
        compare(log_sum(got), log_sum(wanted), atol=1e-5)
        compare(got.label, wanted.label, rtol=1e-6, atol=1e-5)
        rest = (
            wanted.exponent,
            wanted.total.reciprocal().float(),
            None,
            torch.randn(rows).to(DEVICE),
        )
        agree(
            "logit_grad",
            *(raw, labels, columns, *rest, None, *transform),
            rtol=2 * ULP[dtype] + 1e-5,
            atol=1e-5,
        )


SHAPES = on_device(((5, 3), (33, 300), (17, 5000), (64, 32000)), ((5, 3), (3, 300), (2, 5000)))
ROWS = {
    **{
        f"statistics {shape}": (check_stats, *shape)
        for shape in (*SHAPES, *on_device(((3, 128256),), ()))
    },
    "ends of the range": (check_extremes,),
    "blocks": (
        check_blocks,
        *on_device((0, 1, 64, 4095, 4096, 8191, 9000), (0, 1, 64, 191, 300)),
    ),
    **{
        f"{name} {shape}": (check_transform, *shape, *transform)
        for name, transform in {"scale": (0.3, 0.0), "softcap": (2.5, 30.0)}.items()
        for shape in SHAPES
    },
    **{f"gradient {shape}": (check_grad, *shape) for shape in SHAPES},
}
