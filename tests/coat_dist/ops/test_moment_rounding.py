"""Stochastic rounding of moments: without bias, within the guarantees, from noise that anybody
can repeat.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from coat_dist.reference.dither import dither
from coat_dist.reference.moments import TINY, MomentCodec, decode, encode
from tests.coat_dist.ops.moment_groups import (
    CODECS,
    assert_within_bound,
    exact_y,
    spread,
    stored,
    vectors,
)


@pytest.mark.parametrize(
    "codec", [c for c in CODECS if c.group_size == 64 and c.format != "log8"], ids=str
)
def test_stochastic_rounding_is_unbiased_in_the_stored_value(codec):
    x = spread(64 * 4, 1.0)
    y = exact_y(x, encode(x, codec), codec).view(-1)
    rounds = 2048
    generator = torch.Generator().manual_seed(1)
    total, seen = torch.zeros(256, dtype=torch.float64), []
    for _ in range(rounds):
        q = stored(encode(x, codec, torch.rand(256, generator=generator)).q, codec).view(-1)
        total += q
        seen.append(q)
    low, high = torch.stack(seen).amin(0), torch.stack(seen).amax(0)
    if codec.format == "int8":
        step, raised = torch.ones(256), torch.zeros(256).bool()
    else:
        step = (2.0 ** (torch.floor(torch.log2(y)) - codec.kind.fp8.mantissa_bits)).clamp(
            min=codec.kind.fp8.smallest
        )
        raised = codec.keep_nonzero & (y < codec.kind.fp8.smallest)  # rounded up on purpose
    assert (low >= (y - step) * (1 - 1e-4)).all() and (high <= (y + step) * (1 + 1e-4)).all()
    assert ((high - low) <= step * 1.001).all()
    deviation = 0.5 * step / rounds**0.5  # of the mean, at most
    assert ((total / rounds - y).abs() < 5 * deviation + 1e-4 * y)[~raised].all()
    if codec.keep_nonzero:
        assert (low > 0).all()


def test_log8_rounds_stochastically_without_bias_in_the_value():
    """Unbiased in its logarithm, a second moment would grow: with beta2 near one by a third."""
    codec = MomentCodec("log8", group_size=64, keep_nonzero=True)
    x = torch.cat([spread(63, 2.0).square(), torch.tensor([1e-30])])  # steps of 0.4 octaves
    rounds = 4096
    decoded = torch.stack(
        [decode(encode(x, codec, torch.rand(64)), codec) for _ in range(rounds)]
    ).double()
    upper, lower = decoded.amax(0), decoded.amin(0)
    step = 2 ** (encode(x, codec).k.item() / 250)
    assert step > 1.25 and (upper <= lower * step * 1.0001).all() and (upper > lower).sum() > 55
    assert ((decoded.mean(0) - x).abs() <= 5 * 0.5 * (upper - lower) / rounds**0.5 + 1e-5 * x).all()
    even_in_logarithm = (lower * upper).sqrt()
    assert ((decoded.mean(0) - x).abs().sum() < (even_in_logarithm - x).abs().sum()).all()


@settings(max_examples=50, deadline=None)
@given(x=vectors(), extreme=st.sampled_from([0.0, 1 - 2**-16]))
def test_stochastic_rounding_keeps_the_guarantees(x, extreme):
    for codec in (
        MomentCodec(),
        MomentCodec("e5m2"),
        MomentCodec(keep_nonzero=True),
        MomentCodec("int8"),
        MomentCodec("log8", keep_nonzero=True),
    ):
        moment = encode(x, codec, torch.full_like(x, extreme))
        decoded = decode(moment, codec, x.numel())
        assert decoded.isfinite().all()
        zero = x.abs() < TINY
        assert (decoded[zero] == 0).all()
        codes = moment.q.view(-1)[: x.numel()] & (
            0xFF if codec.format in ("int8", "log8") else 0x7F
        )
        # A first moment that is next to the smallest number may decode below it.
        assert (codes[~zero] != 0).all()
        if codec.keep_nonzero:
            assert (decoded.abs()[~zero] >= TINY).all()
        if codec.format in ("int8", "log8"):
            assert_within_bound(x, moment, codec, 2.0)


def test_noise_depends_on_seed_step_and_index_only_and_is_uniform():
    whole = dither(5, 3, 0, 4096, 128)
    part = dither(5, 3, 1024, 96, 128)
    for w, p in zip(whole, part, strict=True):
        assert torch.equal(w[1024:1120], p)
        assert w.min() > 0 and w.max() < 1
    assert not torch.equal(whole[0], dither(6, 3, 0, 4096, 128)[0])
    assert not torch.equal(dither(5, 3, 2**32 * 128, 64, 128)[0], dither(5, 3, 0, 64, 128)[0])
    for size in (64, 256):
        numbers = [
            dither(123, step, 2**32 * size - 51200, 102400, size) for step in (16, 17, 23, 24)
        ]
        for one in (x for pair in numbers for x in pair):
            assert abs(one.mean().item() - 0.5) < 5e-3
            counts = torch.histc(one, 64, 0, 1)
            assert ((counts - 1600).abs() < 6 * 1600**0.5).all()
        columns = torch.stack([x[3::size] for pair in numbers for x in pair])  # an element a group
        related = torch.corrcoef(torch.cat([columns[:, 1:], columns[:, :-1]]))
        m, v = ([i for i in range(16) if i % 2 == which] for which in (0, 1))
        assert related[m][:, v].abs().max() < 0.15, "the moments'"
        assert related[:8, 8:].abs().max() < 0.15, "neighbouring groups'"
        assert related[0, [6, 7]].abs().max() < 0.15 and related[1, [6, 7]].abs().max() < 0.15, (
            "two blocks'"
        )


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_noise_visits_each_eighth_once_in_eight_steps(seed):
    def block(b):
        return torch.stack(
            [torch.stack(dither(seed, t, 0, 64000, 128)) for t in range(8 * b, 8 * b + 8)]
        )

    for b in (0, 1, 9):
        eighths = (block(b) * 8).long().sort(0).values
        assert torch.equal(eighths, torch.arange(8)[:, None, None].expand_as(eighths))
    orders = (block(9)[:, :, ::128] * 8).long().transpose(0, 2).flatten(1).unique(dim=0)
    assert len(orders) > 350, "groups take them in orders of their own"


def test_noise_of_a_group_is_spread_evenly():
    for one in dither(7, 5, 0, 1280, 128):
        gaps = one.view(10, 128).sort(1).values.diff(dim=1)
        assert gaps.max() < 2.7 / 128, (
            "the three-distance theorem: random numbers would leave gaps of five"
        )
