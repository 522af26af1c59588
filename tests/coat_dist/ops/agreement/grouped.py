"""Experts side by side: the same to the byte."""

import itertools

import torch

from coat_dist.formats import E4M3, E5M2, INT8
from coat_dist.reference.grouped import expert_rows
from coat_dist.reference.quantize import quantize_groups, tensor_scale
from tests.support.devices import DEVICE

from . import agree, compare, pair, same

COUNTS = [5, 0, 33, 32, 1], [0, 0, 0], [0, 70, 0, 0]


def near(name, x, *rest):
    """Equal to the bit on a GPU and in fp32; the interpreter truncates to BF16."""
    exact = x.is_cuda or x.dtype == torch.float32
    agree(name, x, *rest, rtol=0 if exact else 2**-7)


def check_rows(counts, fmt, dtype):
    """Rows taken and spread, amax and codes of experts, some without rows, with values that are
    not finite.
    """
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    given = torch.randn(sum(counts), 300, device=DEVICE).mul(4).exp().to(dtype)
    x, _ = agree("take_rows", given, rows.source)
    compare(pair("take_rows")[0](x, rows.place), given)
    factor = torch.rand(sum(counts), device=DEVICE)
    near("take_rows", x, rows.place, factor)
    near("sum_rows", x, torch.randint(0, len(x), (9, 3), device=DEVICE, dtype=torch.int32))
    y8 = quantize_groups(x, INT8, 32, "e8m0")
    for saved, by in itertools.product((None, y8), (None, factor.to(dtype))):
        got, wanted = (f(given, rows, by, saved) for f in pair("spread_gradient"))
        exact = DEVICE != "cpu"
        compare(got.d, wanted.d, rtol=0 if exact or dtype == torch.float32 else 2**-7)
        compare(got.amax, wanted.amax, rtol=0 if exact else 2**-7)
        assert (got.dfactor is None) == (wanted.dfactor is None) == (saved is None or by is None)
        if got.dfactor is not None:
            off = got.dfactor.float() - wanted.dfactor
            assert off.norm() <= 1e-2 * wanted.dfactor.float().norm()
    for bad in (None, torch.nan):
        if bad is not None:
            x[-1, 7] = bad
        _, top = agree("amax_experts", x, rows)
        scales = tensor_scale(top, fmt)
        agree("quantize_experts", x, fmt, scales, rows)
        agree("quantize_experts_both", x, fmt, scales, rows)


def check_weights(k, n, dtype):
    """Weights as they are and transposed, of sizes with and without whole blocks."""
    w = (torch.randn(3, k, n) * torch.rand(3, k, n).mul(9).exp()).to(DEVICE, dtype)
    w[1, 3, 2] = torch.inf
    got, wanted = (f(w, E4M3) for f in pair("quantize_columns"))
    same(got.codes, wanted.codes)
    compare(got.scales, wanted.scales)
    agree("quantize_experts", w, E4M3, torch.rand(3, device=DEVICE) + 0.1, None)


def few(got, wanted):
    """The activation's last bit may move a code."""
    assert got.shape == wanted.shape
    assert (got.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() <= 2e-3


def check_activation(counts, activation, parts):
    """Backward of the activation: the amax of each expert, and codes with each expert's scales."""
    rows = expert_rows(torch.tensor(counts), sum(counts), torch.device(DEVICE))
    total = rows.source.shape[0]
    da = torch.randn(total, 160, device=DEVICE).bfloat16()
    pre8 = quantize_groups(torch.randn(total, parts, 160, device=DEVICE), INT8, 32, "e8m0")
    _, top = agree("activation_grad_amax_experts", da, pre8, activation, rows, rtol=1e-6)
    given = da, pre8, activation, E5M2, tensor_scale(top, E5M2), E4M3
    scales = tensor_scale(torch.rand(len(counts), device=DEVICE) * 9, E4M3, True)
    got, wanted = (f(*given, scales, rows) for f in pair("activation_backward_experts"))
    compare(got[:3], wanted[:3], few)


ROWS = {
    **{
        f"rows {counts}": (check_rows, counts, fmt, dtype)
        for counts, fmt, dtype in zip(
            COUNTS,
            (E4M3, E5M2, E4M3),
            (torch.bfloat16, torch.float32, torch.bfloat16),
            strict=True,
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
        for activation, parts in (("swiglu", 2), ("squared_relu", 1))
    },
}
