"""bfloat16 and a 16-bit remainder are an fp32 number, bit for bit."""

import torch

from coat_dist.reference.master import join, split

EDGES = [0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBFFF, 0xFFFE, 0xFFFF]


def patterns(lower):
    """fp32 numbers with every upper half and the given lower one."""
    upper = torch.arange(1 << 16)
    return ((upper << 16) | lower).to(torch.int32).view(torch.float32)


def bits(x):
    return x.view(torch.int32)


def halves():
    return EDGES + torch.randint(1 << 16, (40,)).tolist()


def test_join_is_the_inverse_of_split_for_every_number():
    for lower in halves():
        x = patterns(lower)
        p, low = split(x)
        assert (
            p.dtype == torch.bfloat16
            and low.dtype == torch.int16
            and p.shape == low.shape == x.shape
        )
        back = join(p, low)
        assert torch.equal(bits(back)[~x.isnan()], bits(x)[~x.isnan()])
        assert back.isnan().equal(x.isnan()) and p.isnan().equal(x.isnan())
        assert (bits(back)[x.isnan()] == 0x7FC00000).all() and (low[x.isnan()] == 0).all()


def test_the_weight_is_torchs_cast_but_for_half_of_the_ties():
    for lower in halves():
        x = patterns(lower)
        p, cast = split(x)[0], x.bfloat16()
        different = (p.view(torch.int16) != cast.view(torch.int16)) & ~x.isnan()
        if lower != 0x8000:
            assert not different.any()
            continue
        even = (bits(x) >> 16) % 2 == 0
        assert torch.equal(different, even & ~x.isnan())
        assert ((p.float() - x).abs() == (cast.float() - x).abs())[
            different & p.isfinite()
        ].all(), "both are nearest"
        assert (p.float().abs() > cast.float().abs())[different].all(), "away from zero"


def test_any_remainder_joins_to_a_number_that_rounds_to_the_weight():
    """So a weight that was overwritten stays what was written, and never becomes NaN."""
    p = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    for lower in halves():
        low = torch.full_like(p, 0, dtype=torch.int16) + (lower - ((lower >> 15) << 16))
        x = join(p, low)
        again = split(x)[0]
        assert torch.equal(again.view(torch.int16)[~p.isnan()], p.view(torch.int16)[~p.isnan()])
        assert x.isnan().equal(p.isnan())
