"""How the kernels for experts must agree with their definitions: to the byte."""

import itertools

import torch

from coat_dist.formats import E4M3, E5M2, INT8
from coat_dist.kernels import grouped
from coat_dist.reference import grouped as reference
from coat_dist.reference.quantize import quantize_groups, tensor_scale

from .codes import same

COUNTS = [[5, 0, 33, 32, 1], [0, 0, 0], [0, 70, 0, 0]]


def near(got, wanted):
    """Equal to the bit on a GPU and in fp32; the interpreter truncates to BF16."""
    exact = got.is_cuda or got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=0 if exact else 2**-7, atol=0)


def check_rows_of_experts(device="cpu"):
    """Rows taken and spread, amax and codes of experts, some without rows, with values that are
    not finite.
    """
    for counts, fmt, dtype in zip(
        COUNTS, (E4M3, E5M2, E4M3), (torch.bfloat16, torch.float32, torch.bfloat16), strict=True
    ):
        rows = reference.expert_rows(torch.tensor(counts), sum(counts), torch.device(device))
        given = torch.randn(sum(counts), 300, device=device).mul(4).exp().to(dtype)
        x = grouped.take_rows(given, rows.source)
        assert torch.equal(x, reference.take_rows(given, rows.source))
        assert torch.equal(grouped.take_rows(x, rows.place), given)
        factor = torch.rand(sum(counts), device=device)
        got, wanted = (m.take_rows(x, rows.place, factor) for m in (grouped, reference))
        near(got, wanted)
        index = torch.randint(0, x.shape[0], (9, 3), device=device, dtype=torch.int32)
        near(*(m.sum_rows(x, index) for m in (grouped, reference)))
        y8 = quantize_groups(x, INT8, 32, "e8m0")
        for saved, by in itertools.product((None, y8), (None, factor.to(dtype))):
            got, wanted = (m.spread_gradient(given, rows, by, saved) for m in (grouped, reference))
            near(got.d, wanted.d)
            torch.testing.assert_close(
                got.amax, wanted.amax, rtol=0 if got.amax.is_cuda else 2**-7, atol=0
            )
            assert (
                (got.dfactor is None) == (wanted.dfactor is None) == (saved is None or by is None)
            )
            if got.dfactor is not None:
                assert (
                    got.dfactor.float() - wanted.dfactor
                ).norm() <= 1e-2 * wanted.dfactor.float().norm()
        for bad in (None, torch.nan):
            if bad is not None:
                x[-1, 7] = bad
            top = reference.amax_experts(x, rows)
            assert torch.equal(grouped.amax_experts(x, rows), top)
            scales = tensor_scale(top, fmt)
            same(*(m.quantize_experts(x, fmt, scales, rows).codes for m in (grouped, reference)))
            both = (m.quantize_experts_both(x, fmt, scales, rows) for m in (grouped, reference))
            for got, wanted in zip(*both, strict=True):
                same(got.codes, wanted.codes)
                assert got.layout == wanted.layout == "expert"


def check_weights_of_experts(device="cpu"):
    """Weights as they are and transposed, of sizes with and without whole blocks."""
    for (k, n), dtype in itertools.product(
        ((64, 96), (40, 70), (33, 5)), (torch.bfloat16, torch.float32)
    ):
        w = (torch.randn(3, k, n) * torch.rand(3, k, n).mul(9).exp()).to(device, dtype)
        w[1, 3, 2] = torch.inf
        got, wanted = (m.quantize_columns(w, E4M3) for m in (grouped, reference))
        same(got.codes, wanted.codes)
        torch.testing.assert_close(got.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
        scales = torch.rand(3, device=device) + 0.1
        same(*(m.quantize_experts(w, E4M3, scales, None).codes for m in (grouped, reference)))


def check_activation_of_experts(device="cpu"):
    """Backward of the activation: the amax of each expert, and codes with each expert's scales."""
    for counts, activation in itertools.product(COUNTS, ("swiglu", "squared_relu")):
        rows = reference.expert_rows(torch.tensor(counts), sum(counts), torch.device(device))
        total, parts = rows.source.shape[0], 2 if activation == "swiglu" else 1
        da = torch.randn(total, 160, device=device).bfloat16()
        pre8 = quantize_groups(torch.randn(total, parts, 160, device=device), INT8, 32, "e8m0")
        got, wanted = (
            m.activation_grad_amax_experts(da, pre8, activation, rows) for m in (grouped, reference)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
        scales = (
            tensor_scale(wanted, E5M2),
            tensor_scale(torch.rand(len(counts), device=device) * 9, E4M3, True),
        )
        given = da, pre8, activation, E5M2, scales[0], E4M3, scales[1], rows
        for got, wanted in zip(
            *(m.activation_backward_experts(*given)[:3] for m in (grouped, reference)), strict=True
        ):
            assert got.layout == wanted.layout == "expert" and got.codes.shape == wanted.codes.shape
            off = (got.codes.view(torch.uint8) != wanted.codes.view(torch.uint8)).float().mean()
            assert off <= 2e-3  # the activation's last bit
