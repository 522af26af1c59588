"""Experts side by side: the same to the byte."""

import torch

from coat_dist.formats import E4M3, E5M2, INT8
from coat_dist.kernels.grouped import spread_scales
from coat_dist.reference.grouped import BLOCK, expert_rows
from coat_dist.reference.quantize import (
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    tensor_scale,
)
from tests.support.devices import DEVICE

from . import agree, compare, pair, same

COUNTS = [5, 0, 33, 32, 1], [0, 0, 0], [0, 70, 0, 0]


def near(name, x, *rest):
    """Equal to the bit on a GPU and in fp32; the interpreter truncates to BF16."""
    exact = x.is_cuda or x.dtype == torch.float32
    agree(name, x, *rest, rtol=0 if exact else 2**-7)


def check_rows(counts, dtype):
    """Rows taken and summed, and their factors, of experts of which some have no rows."""
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    given = torch.randn(sum(counts), 300, device=DEVICE).mul(4).exp().to(dtype)
    x, _ = agree("take_rows", given, rows.source)
    compare(pair("take_rows")[0](x, rows.place), given)
    factor = torch.rand(sum(counts), device=DEVICE)
    near("take_rows", x, rows.place, factor)
    index = torch.randint(-1, len(x), (9, 3), device=DEVICE, dtype=torch.int32)
    near("sum_rows", x, index)
    near("sum_rows", x, index, torch.rand(9, 3, device=DEVICE))
    y8 = quantize_groups(given, INT8, 32, "e8m0")
    for saved in (None, y8):
        found = (f(given, factor.to(dtype), saved) for f in pair("scale_rows_backward"))
        (d, dfactor), (wanted, dwanted) = found
        exact = DEVICE != "cpu" or dtype == torch.float32
        compare(d, wanted, rtol=0 if exact else 2**-7)
        assert (dfactor is None) == (dwanted is None) == (saved is None)
        if dfactor is not None:
            off = dfactor.float() - dwanted
            assert off.norm() <= 1e-2 * dwanted.float().norm()


def check_routes(tokens, choices, experts, columns):
    """A router's choices, some dropped, and codes that travel to the experts' rows."""
    index = torch.randint(-1, experts + 1, (tokens, choices), device=DEVICE)
    got, wanted = (function(index, experts) for function in pair("route"))
    total = len(wanted.source)
    compare(got.place, wanted.place)
    compare(got.ends[:-1], wanted.ends[:-1])
    compare(got.source[:total], wanted.source)
    compare(got.blocks[: total // BLOCK], wanted.blocks)
    assert (got.source[total:] == -1).all() and got.ends[-1] == len(got.source)
    x = (torch.randn(tokens, columns, device=DEVICE) * 9).exp().bfloat16()
    by_rows = [quantize_rows(x, fmt, aligned=True) for fmt in (E4M3, E5M2)]
    whole = quantize_tensor(x, E5M2, torch.rand((), device=DEVICE) + 0.1)
    for q in (*by_rows, whole):
        mine, theirs = (function(q, got, choices) for function in pair("take_codes"))
        same(mine.codes, theirs.codes)
        compare(mine.scales, theirs.scales)
    agree("take_codes_transposed", whole, got, choices)
    for q in by_rows:
        taken = pair("take_codes")[1](q, got, choices).scales
        _, scales = agree("largest_rows", taken, got, 2.0**-126)
        agree("take_codes_transposed", q, got, choices, scales)


def check_scales(counts):
    """The largest scale of an expert's rows, NaN too, and scales of experts spread for products."""
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    scales = torch.rand(len(rows.source), 1, device=DEVICE)
    factor = torch.randn(sum(counts), device=DEVICE).bfloat16()
    for bad in (None, torch.nan):
        if bad is not None:
            scales[-1] = bad
        for times in (None, factor):
            agree("largest_rows", scales, rows, 2.0**-126, times)
    a, one = torch.rand(len(counts), device=DEVICE), torch.rand((), device=DEVICE)
    b, blocks = one.expand(len(counts)), rows.blocks.long()
    compare(spread_scales(a, b, 3, 5), (a.repeat_interleave(3), b.repeat_interleave(5)))
    of_rows = a[blocks].repeat_interleave(BLOCK)
    compare(spread_scales(a, b, 1, 7, rows), (of_rows, b.repeat_interleave(7)))


def check_weights(k, n, dtype):
    """Weights as they are and transposed, of sizes with and without whole blocks."""
    w = (torch.randn(3, k, n) * torch.rand(3, k, n).mul(9).exp()).to(DEVICE, dtype)
    w[1, 3, 2] = torch.inf
    got, wanted = (f(w, E4M3) for f in pair("quantize_columns"))
    same(got.codes, wanted.codes)
    compare(got.scales, wanted.scales)
    scales = torch.rand(3, device=DEVICE) + 0.1
    for turned in (False, True):
        for given in (w, quantize_rows(w, E4M3, aligned=True)):
            agree("quantize_experts", given, E4M3, scales, turned)


def few(got, wanted):
    """The activation's last bit may move a code."""
    assert got.shape == wanted.shape
    assert (got.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() <= 2e-3


def check_activation(counts, activation, parts):
    """The activation with each expert's bias; in backward the amax of each expert, and codes with
    each expert's scales.
    """
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    total = rows.source.shape[0]
    da = torch.randn(total, 160, device=DEVICE).bfloat16()
    pre = torch.randn(total, parts * 160, device=DEVICE) * 5
    bias = torch.randn(len(counts), parts * 160, device=DEVICE) * 5
    given = pre, activation, E4M3, 32, "e8m0", True, bias, INT8, rows.blocks
    _, (pre8, _) = agree("activation_compress_rows", *given, codes=few)
    scales = tensor_scale(torch.rand(len(counts), device=DEVICE) * 9, E4M3, True)
    for factor in (None, torch.rand(sum(counts), device=DEVICE)):
        first = da, pre8, activation
        if factor is None:
            _, top = agree("activation_grad_amax", *first, rows, rtol=1e-5)
        else:
            both = (f(*first, rows, factor) for f in pair("activation_factor_grad"))
            (got, dfactor), (top, dfactor2) = both
            compare(got, top, rtol=1e-5)
            compare(dfactor, dfactor2, rtol=1e-3, atol=1e-3)
        given = *first, E5M2, tensor_scale(top, E5M2), E4M3, scales, torch.float32, rows, factor
        got, wanted = (f(*given) for f in pair("activation_backward"))
        compare(got[:3], wanted[:3], few)
        compare(got.dbias, wanted.dbias, rtol=1e-4, atol=1e-3)


ROWS = {
    **{
        f"rows {counts} {dtype}": (check_rows, counts, dtype)
        for counts, dtype in zip(
            COUNTS, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True
        )
    },
    **{f"scales {counts}": (check_scales, counts) for counts in COUNTS},
    **{
        f"routes {sizes}": (check_routes, *sizes)
        for sizes in (
            (40, 2, 4, 64),
            (67, 3, 9, 70),
            (33, 8, 130, 33),
            (650, 2, 5, 16),
            (50, 2, 300, 16),
            (0, 2, 3, 16),
        )
    },
    **{
        f"weights {k} x {n} {dtype}": (check_weights, k, n, dtype)
        for k, n in ((64, 96), (40, 70), (33, 5))
        for dtype in (torch.bfloat16, torch.float32)
    },
    **{
        f"{activation} {counts}": (check_activation, counts, activation, parts)
        for counts in COUNTS
        for activation, parts in (
            *(("swiglu", 2), ("squared_relu", 1)),
            *(("clamped_swiglu", 2), ("interleaved_quick_geglu", 2)),
        )
    },
}
