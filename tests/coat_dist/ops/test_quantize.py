"""FP8 quantization: exact rounding, scales that never saturate, nothing non-finite hidden."""

import pytest
import torch

from coat_dist.formats import E3M4, E4M3, E5M2, INT8
from coat_dist.reference.quantize import (
    SMALLEST_SCALE,
    amax,
    amaxes,
    code_values,
    dequantize,
    group_scales,
    power_of_two,
    quantize_groups,
    quantize_rows,
    quantize_tensor,
    scale_values,
    tensor_scale,
)

from .agreement import same

FORMATS = [E4M3, E5M2]
SAVED_FORMATS = [*FORMATS, E3M4, INT8]
SCALES = ["e8m0", "bf16"]
ids = {"ids": lambda f: f.name}


def wide(*shape, low=-60, high=60):
    """Normal numbers times powers of two: many magnitudes in one tensor."""
    return torch.randn(shape) * torch.exp2(torch.randint(low, high, shape).float())


def finite_codes(fmt):
    values = code_values(torch.arange(256, dtype=torch.uint8).view(fmt.dtype)).double()
    return values[values.isfinite() & (values.abs() <= fmt.max)].unique()


def nearest_even(x, fmt):
    """Round fp64 to the format by search in its list of values; ties to the even code. E3M4
    takes fp16's numbers.
    """
    x = (x.float() * 2.0**-12).half().double() * 2.0**12 if fmt is E3M4 else x
    table = finite_codes(fmt)
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    odd = ((above - 1 - int((table == 0).nonzero()[0])) % 2).bool()  # codes count from zero
    up = (high - x < x - low) | ((high - x == x - low) & odd)
    return torch.where(up, high, low)


def test_e3m4_has_the_numbers_of_its_exponents_and_mantissas():
    fractions = torch.arange(16, dtype=torch.float64) / 16
    positive = torch.cat([fractions * 2.0**-2, *((1 + fractions) * 2.0**e for e in range(-2, 5))])
    assert torch.equal(code_values(torch.arange(128, dtype=torch.uint8)).double(), positive)
    assert torch.equal(code_values(torch.arange(128, 256, dtype=torch.uint8)).double(), -positive)
    assert positive.max() == E3M4.max and positive[1] == E3M4.smallest


@pytest.mark.parametrize("fmt", SAVED_FORMATS, **ids)
def test_quantize_tensor_rounds_to_nearest_even(fmt):
    table = finite_codes(fmt)
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat(
        [
            table,
            middles,
            torch.empty(20000, dtype=torch.float64).uniform_(-fmt.max, fmt.max),
            wide(20000, low=-24, high=-2).double().clamp(-fmt.max, fmt.max),
        ]
    ).float()
    q = quantize_tensor(x, fmt, torch.tensor(1.0))
    assert torch.equal(code_values(q.codes).double(), nearest_even(x.double(), fmt))


@pytest.mark.parametrize("fmt", FORMATS, **ids)
def test_quantize_tensor_saturates_and_keeps_nan(fmt):
    x = torch.tensor([1.0, 1.2, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    got = dequantize(quantize_tensor(x, fmt, torch.tensor(1.0 / fmt.max)))
    expected = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0, torch.nan, 0.0, 0.0])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS, **ids)
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-30, 3.7, 448.0, 1e38])
def test_tensor_scale_uses_the_whole_range(fmt, largest):
    x = torch.rand(5, 7) * largest
    x[2, 3] = largest
    scale = tensor_scale(amax(x), fmt)
    q = quantize_tensor(x, fmt, scale)
    assert scale >= SMALLEST_SCALE and scale.isfinite()
    if largest > fmt.max * SMALLEST_SCALE:
        assert q.codes.float().max() == fmt.max
    exact = nearest_even((x * scale.reciprocal()).double(), fmt)
    assert torch.equal(code_values(q.codes).double(), exact)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_tensor_scale_of_non_finite_values(bad):
    x = torch.randn(4, 8)
    x[1, 2] = bad
    assert amax(x) == torch.inf
    assert torch.equal(amaxes(x, -1).isinf(), torch.tensor([False, True, False, False]))
    q = quantize_tensor(x, E4M3, tensor_scale(amax(x), E4M3))
    assert dequantize(q).isnan().all()


def test_amax_of_nothing_is_zero():
    assert amax(torch.empty(0, 5)) == 0 and amax(torch.empty(0, 5)).shape == ()
    assert torch.equal(amaxes(torch.empty(3, 0), -1), torch.zeros(3))
    assert amax(torch.tensor([[-3.0, 2.0]], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("fmt", FORMATS, **ids)
def test_quantize_tensor_transposed(fmt):
    x = torch.randn(3, 5, 7)
    scale = tensor_scale(amax(x), fmt)
    plain, flipped = quantize_tensor(x, fmt, scale), quantize_tensor(x, fmt, scale, transpose=True)
    same(flipped.codes, plain.codes.view(15, 7).t())


@pytest.mark.parametrize("fmt", SAVED_FORMATS, **ids)
def test_quantize_groups_e8m0_is_the_smallest_power_of_two(fmt):
    edges = fmt.max * torch.exp2(torch.arange(-100, 100).float())
    largest = torch.cat(
        [
            edges,
            edges.nextafter(torch.tensor(0.0)),
            edges.nextafter(torch.tensor(torch.inf)),
            wide(5000, low=-100, high=120).abs(),
        ]
    )
    stored = group_scales(largest, fmt, "e8m0")
    scale = scale_values(stored).double()
    assert torch.equal(scale, torch.exp2(stored.double() - 127))
    assert (scale * fmt.max >= largest).all()
    assert (stored > 1).sum() > 5000  # 1 is the smallest there is, whatever the elements are
    assert (scale / 2 * fmt.max < largest)[stored > 1].all()


def test_quantize_groups_e8m0_extremes():
    largest = torch.tensor([0.0, 1e-45, 1e-38, 3.4e38, torch.inf])
    assert group_scales(largest, E4M3, "e8m0").tolist() == [1, 1, 1, 247, 255]
    values = scale_values(torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127] and values[4].isnan()


@pytest.mark.parametrize("fmt", SAVED_FORMATS, **ids)
def test_quantize_groups_bf16_scale_is_rounded_up(fmt):
    largest = wide(5000, low=-80, high=100).abs()
    stored = group_scales(largest, fmt, "bf16")
    assert stored.dtype == torch.bfloat16
    ratio = stored.double() * fmt.max / largest.double()
    assert (ratio >= 1 - 2.0**-23).all() and (ratio < 1 + 2.0**-7 + 1e-6).all()


@pytest.mark.parametrize("fmt", SAVED_FORMATS, **ids)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("n", [1, 15, 16, 75])
def test_quantize_groups_is_a_loop_over_groups(fmt, scale, n):
    x = wide(4, 3, n, low=-6, high=6) * torch.exp2(torch.randint(-40, 40, (4, 3, 1)).float())
    x[0, 0] = 0.0
    q = quantize_groups(x, fmt, 16, scale)
    assert q.codes.shape == x.shape and q.codes.is_contiguous()
    assert q.nbytes == x.numel() + q.scales.numel() * q.scales.itemsize
    codes, scales = code_values(q.codes).split(16, -1), q.scales.unbind(-1)
    for part, got, stored in zip(x.split(16, -1), codes, scales, strict=True):
        assert torch.equal(stored, group_scales(part.abs().amax(-1), fmt, scale))
        inverse = 1 / scale_values(stored)[..., None]
        assert torch.equal(got.double(), nearest_even((part * inverse).double(), fmt))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_quantize_groups_of_a_bad_value(scale, bad):
    x = torch.randn(2, 70)
    x[1, 69] = bad
    got = dequantize(quantize_groups(x, E4M3, 32, scale))
    assert got[1, 64:].isnan().all()
    assert got[0].isfinite().all() and got[1, :64].isfinite().all()


@pytest.mark.parametrize("scale", SCALES)
def test_quantize_groups_of_subnormal_and_huge_values(scale):
    x = torch.tensor([[1e-45, -1e-40, 0.0, 1e-39], [1e38, -1e-38, 1.0, 1.5e38]])
    assert dequantize(quantize_groups(x, E4M3, 4, scale)).isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS, **ids)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 64), (7, 1), (1, 300)])
def test_quantize_rows_is_quantize_tensor_of_each_row(fmt, aligned, shape):
    x = wide(*shape, low=-8, high=8) * torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1)).float())
    x.view(-1, shape[-1])[0] = 0.0
    x.view(-1, shape[-1])[-1, 0] = 1e-41
    got = quantize_rows(x, fmt, aligned)
    assert got.layout == "row" and got.codes.shape == x.shape and got.codes.is_contiguous()
    rows = x.view(-1, shape[-1])
    scales = torch.stack([tensor_scale(amax(row), fmt, aligned) for row in rows])
    assert torch.equal(got.scales, scales.view(*shape[:-1], 1))
    for row, codes, scale in zip(rows, got.codes.view(rows.shape), scales, strict=True):
        same(codes, quantize_tensor(row, fmt, scale).codes)
    assert torch.equal(got.top, tensor_scale(amax(x), fmt, aligned))
    assert dequantize(got).isfinite().all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("aligned", [False, True])
def test_quantize_rows_of_a_bad_value(bad, aligned):
    x = torch.randn(5, 40)
    clean = quantize_rows(x, E4M3, aligned)
    x[3, 7] = bad
    got = quantize_rows(x, E4M3, aligned)
    others = [0, 1, 2, 4]
    assert dequantize(got)[3].isnan().all() and got.scales[3].isnan() and got.top.isnan()
    same(got.codes[others], clean.codes[others])
    assert torch.equal(got.scales[others], clean.scales[others])


def test_quantize_rows_of_nothing():
    none, empty = quantize_rows(torch.empty(0, 8), E4M3), quantize_rows(torch.empty(3, 0), E4M3)
    assert none.codes.shape == (0, 8) and none.scales.shape == (0, 1) and none.top is None
    assert empty.codes.shape == (3, 0) and torch.equal(
        empty.scales, torch.full((3, 1), SMALLEST_SCALE)
    )


def test_power_of_two_is_the_next_one():
    exponents = torch.arange(-126, 127).float()
    powers = torch.exp2(exponents)
    assert torch.equal(power_of_two(powers), powers)
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(power_of_two(above), 2 * powers)
    assert torch.equal(power_of_two(torch.nextafter(2 * powers, torch.tensor(0.0))), 2 * powers)
    assert power_of_two(torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_dequantize_of_power_of_two_scales_fits_bfloat16(fmt):
    q = quantize_groups(torch.randn(7, 100).mul(4).exp(), fmt, 32, "e8m0")
    assert torch.equal(dequantize(q, torch.bfloat16).float(), dequantize(q))
