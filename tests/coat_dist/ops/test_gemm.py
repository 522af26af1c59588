"""FP8 products: exact against integer arithmetic, in any order, and independent of chunks."""

import pytest
import torch

from coat_dist import ops
from coat_dist.formats import QuantizedTensor
from coat_dist.reference import gemm
from coat_dist.reference.gemm import code_products, exact_mm, scale_and_round, scaled_mm


def random_codes(*shape, dtype=torch.float8_e4m3fn, finite=True):
    """Every code equally likely, so sums mix the largest and the smallest products."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.where(codes.float().isfinite(), codes.float(), 0.0).to(dtype) if finite else codes


def operand(*shape, dtype=torch.float8_e4m3fn, scale=None):
    return QuantizedTensor(
        random_codes(*shape, dtype=dtype),
        torch.rand(()) + 0.1 if scale is None else scale,
        "tensor",
    )


def row_operand(rows, k, dtype=torch.float8_e4m3fn):
    """A scale per row, over many magnitudes."""
    scales = torch.exp2(torch.randint(-30, 30, (rows, 1)).float()) * (torch.rand(rows, 1) + 0.5)
    return QuantizedTensor(random_codes(rows, k, dtype=dtype), scales, "row")


def as_integers(codes):
    return (codes.double() * 2**9).long()


def test_code_products_are_exact():
    a, b = operand(9, 3000), operand(7, 3000)
    exact = (as_integers(a.codes)[:, None, :] * as_integers(b.codes)[None]).sum(-1)
    assert exact.abs().max() < 2**53
    assert torch.equal(code_products(a, b), exact.double() / 2**18)


def test_code_products_split_over_the_sum():
    a, b = operand(5, 640), operand(6, 640)
    whole = scaled_mm(a, b, torch.float32)
    order = torch.randperm(640)
    parts = [
        code_products(
            *(QuantizedTensor(q.codes[:, part].contiguous(), q.scales, "tensor") for q in (a, b))
        )
        for part in order.tensor_split([1, 100, 450])
    ]
    assert torch.equal(whole, scale_and_round(sum(parts), a.scales, b.scales, torch.float32))


def test_exact_mm_in_chunks(monkeypatch):
    a, b = torch.randn(37, 50), torch.randn(23, 50, dtype=torch.bfloat16)
    whole = exact_mm(a, b)
    assert torch.allclose(whole, a.double() @ b.double().t())
    x, w = operand(37, 50), operand(23, 50)
    codes = code_products(x, w)
    monkeypatch.setattr(gemm, "_CHUNK", 120)
    torch.testing.assert_close(exact_mm(a, b), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(code_products(x, w), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaled_mm_value_and_type(dtype, other):
    a, b = operand(8, 33), operand(3, 33, dtype=other)
    got = scaled_mm(a, b, dtype)
    expected = (a.codes.double() * a.scales) @ (b.codes.double() * b.scales).t()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=1e-4)
    assert torch.equal(got, ops.scaled_mm(a, b, dtype, fast_accum=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, n, k", [(8, 3, 33), (1, 1, 16), (1, 5, 7), (0, 4, 16), (37, 19, 64)])
def test_scaled_mm_with_row_scales(dtype, m, n, k):
    """Products of codes are exact in fp64, and so is the product of two scales: one rounding in
    fp64, one in fp32.
    """
    a, b = row_operand(m, k), row_operand(n, k)
    got = scaled_mm(a, b, dtype)
    exact = (a.codes.double() @ b.codes.double().t()) * (
        a.scales.double() * b.scales.double()[:, 0]
    )
    assert got.dtype == dtype and torch.equal(got, exact.float().to(dtype))
    values = (a.codes.double() * a.scales) @ (b.codes.double() * b.scales).t()
    torch.testing.assert_close(
        exact, values, rtol=1e-9, atol=1e-9 * values.abs().amax().item() if m else 0
    )
    assert torch.equal(got, ops.scaled_mm(a, b, dtype, fast_accum=True))
    for i in range(m):  # a row's result is its own
        one = QuantizedTensor(a.codes[i : i + 1], a.scales[i : i + 1], "row")
        assert torch.equal(scaled_mm(one, b, dtype), got[i : i + 1])


def test_scaled_mm_of_a_bad_row():
    a, b = row_operand(4, 16), row_operand(3, 16)
    a.scales[1] = torch.nan
    b.scales[2] = torch.nan
    wanted = torch.zeros(4, 3, dtype=torch.bool)
    wanted[1], wanted[:, 2] = True, True
    assert torch.equal(scaled_mm(a, b, torch.float32).isnan(), wanted)


def test_scaled_mm_of_nan():
    a, b = operand(4, 16), operand(3, 16)
    a.codes.view(torch.uint8)[2, 5] = 0x7F
    assert torch.equal(
        scaled_mm(a, b, torch.float32).isnan().all(1), torch.tensor([False, False, True, False])
    )
    assert scaled_mm(operand(4, 16, scale=torch.tensor(torch.nan)), b, torch.float32).isnan().all()


def test_scaled_mm_refuses_misfits():
    with pytest.raises(ValueError, match=r"b: got shape \[3, 8\], accepted: \[n, 16\]"):
        scaled_mm(operand(4, 16), operand(3, 8), torch.float32)
    grouped = QuantizedTensor(
        random_codes(4, 16), torch.ones(4, 1, dtype=torch.bfloat16), "group", 16
    )
    with pytest.raises(ValueError, match="a: got layout 'group'"):
        scaled_mm(grouped, operand(3, 16), torch.float32)
    with pytest.raises(ValueError, match="b: got layout 'row', accepted: 'tensor', as a has"):
        scaled_mm(operand(4, 16), row_operand(3, 16), torch.float32)
    with pytest.raises(ValueError, match="b: got layout 'tensor', accepted: 'row', as a has"):
        code_products(row_operand(4, 16), operand(3, 16))
