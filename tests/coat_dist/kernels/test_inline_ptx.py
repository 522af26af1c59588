"""Inline PTX that converts to and from the formats of saved tensors, against the definitions, packet by packet."""

import pytest
import torch

pytest.importorskip("triton")

from coat_dist.formats import E3M4, INT8  # noqa: E402
from coat_dist.kernels import groups  # noqa: E402
from coat_dist.reference.quantize import quantize_tensor  # noqa: E402

from . import inline_ptx  # noqa: E402

ENCODERS = {"e3m4": (E3M4, groups._e3m4, 2.0**-12), "int8": (INT8, groups._int8, 1.0)}


def numbers(fmt):
    """Values up to the largest, of all sizes: codes, middles of two with their neighbours, both zeros, subnormals."""
    steps = torch.arange(-8 * fmt.max, 8 * fmt.max + 1) / 8
    fine = torch.arange(-4096, 4097) * fmt.smallest / 64
    middles = torch.cat([steps, fine]).float()
    around = [middles.nextafter(torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    drawn = torch.randn(200_000) * torch.exp2(torch.empty(200_000).uniform_(-40, 6))
    x = torch.cat([middles, *around, drawn, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39])]).clamp(-fmt.max, fmt.max)
    return x[: len(x) // 4 * 4]


@pytest.mark.parametrize("name", ENCODERS)
def test_codes_are_those_of_the_definition(name):
    fmt, encode, factor = ENCODERS[name]
    x = numbers(fmt)
    for order in (x, x.flip(0), x[torch.randperm(len(x))]):
        got = inline_ptx.call(encode, order * factor)
        assert got.dtype == fmt.dtype
        assert torch.equal(got, quantize_tensor(order, fmt, torch.ones(())).codes)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_leaves_its_neighbours_alone(name, bad):
    """A packet of four may hold numbers of several groups."""
    fmt, encode, factor = ENCODERS[name]
    rows = torch.tensor([[1.0, -2.0, 3.0, fmt.max], [-fmt.max, 0.0, -0.0, -1.0]]).repeat_interleave(16, 0)
    spoilt = (torch.arange(32)[:, None] >> torch.arange(4) & 1).bool()
    got = inline_ptx.call(encode, rows.masked_fill(spoilt, bad) * factor)
    assert torch.equal(got[~spoilt], quantize_tensor(rows, fmt, torch.ones(())).codes[~spoilt])


def test_int8_is_read_back():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    for order in (codes, codes.flip(0), codes[torch.randperm(256)]):
        assert torch.equal(inline_ptx.call(groups._from_int8, order), order.float())
