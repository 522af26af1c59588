"""Encoding of moments: what reference/moments.py says holds for every input."""

import math

import pytest
import torch
from hypothesis import assume, given, settings

from coat_dist.formats import E4M3, E5M2
from coat_dist.reference.moments import TINY, MomentCodec, decode, encode
from tests.coat_dist.ops.moment_groups import (
    CODECS,
    FP8_CODECS,
    assert_metadata,
    assert_within_bound,
    exact_y,
    spread,
    vectors,
)
from tests.support import equal


@pytest.mark.parametrize("codec", CODECS, ids=str)
@settings(max_examples=25, deadline=None)
@given(x=vectors())
def test_guarantees_over_adversarial_groups(codec, x):
    moment = encode(x, codec)
    n, groups = x.numel(), -(-x.numel() // codec.group_size)
    assert [(t.dtype, tuple(t.shape)) for t in moment] == [
        (torch.uint8, (groups, codec.group_size)),
        (torch.bfloat16, (groups,)),
        (torch.uint8, (groups,)),
    ]
    decoded = decode(moment, codec, n)
    assert decoded.shape == (n,) and decoded.dtype == torch.float32
    assert decoded.isfinite().all()
    zero = x.abs() < TINY
    assert (decoded[zero] == 0).all()
    if codec.keep_nonzero:
        assert (decoded.abs()[decoded != 0] >= TINY).all()
    if codec.format != "log8":  # has no sign: it is for squares
        same_sign = decoded.signbit() == x.signbit()
        # Whose zero has none.
        assert (same_sign | ((decoded == 0) & (codec.format == "int8"))).all()
    if codec.expand or codec.keep_nonzero:
        assert (decoded[~zero] != 0).all()
    assert (decode(moment, codec)[n:] == 0).all()
    assert_metadata(x, moment, codec)
    # Rounding up to the smallest code has no relative bound.
    if not (codec.keep_nonzero and not codec.expand):
        assert_within_bound(x, moment, codec)


@pytest.mark.parametrize(
    "codec, least",
    [
        (MomentCodec(f, keep_nonzero=second), 2.28)
        for f in ("e4m3", "e5m2")
        for second in (False, True)
    ]
    + [(MomentCodec("int8"), 3.96)],
    ids=str,
)
def test_the_smallest_element_lands_where_the_docstring_says(codec, least):
    """In steps of the smallest code: 2.3 in FP8 for both moments, 3.97 with int8, and less than
    one step of k above.
    """
    step = 1.0 if codec.format == "int8" else codec.kind.fp8.smallest
    x = torch.cat([spread(127, 1.0).abs(), torch.tensor([1e-12])])
    moment = encode(x, codec)
    y = exact_y(x, moment, codec).min().item()
    one_more = (codec.kind.max / y) ** (1 / moment.k.item())
    assert least <= y / step <= (least + 0.02) * one_more


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=lambda f: f.name)
def test_encode_gives_the_nearest_codes(fp8):
    """Without expansion and with a = F, codes are plain FP8 rounding, as torch has it."""
    table = torch.arange(128, dtype=torch.uint8).view(fp8.dtype).float()
    table = table[table.isfinite()]
    between = (table[1:] + table[:-1]) / 2
    ends = torch.tensor([torch.inf, 0.0])[:, None]
    values = torch.cat([table, between, *torch.nextafter(between, ends)])
    groups = torch.zeros(len(values), 64)
    groups[:, 0], groups[:, 1], groups[:, 2] = fp8.max, values, -values
    q = encode(groups, MomentCodec(fp8.name, expand=False, group_size=64)).q
    # Logarithms in fp32 may move a value over a middle that is so close.
    apart = (torch.log2(between.double()) - torch.log2(values.double())[:, None]).abs().amin(1)
    wanted = values.to(fp8.dtype).view(torch.uint8)
    assert ((q[:, 1] == wanted) | (apart < 4e-6)).all()
    assert ((q[:, 1].int() - wanted.int()).abs() <= 1).all()
    ties = slice(len(table), len(table) + len(between))
    # Most of them go to the even code, as logarithms leave three in four where they are.
    assert (q[:, 1] == wanted)[ties].float().mean() > 0.65
    assert torch.equal(q[:, 2], q[:, 1] | 0x80)
    assert (q[:, 0] == len(table) - 1).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_input_makes_its_group_nan_and_no_other(codec, bad):
    size = codec.group_size
    x = spread(3 * size, 1.0)
    clean = encode(x, codec)
    x[size + 7] = bad
    for noise in (None, torch.rand(x.shape)):
        decoded = decode(encode(x, codec, noise), codec).view(3, size)
        assert decoded[1].isnan().all()
        assert decoded[::2].isfinite().all()
    dirty = encode(x, codec)
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine[::2], other[::2])


@pytest.mark.parametrize("codec", [c for c in FP8_CODECS if not c.expand], ids=str)
@settings(max_examples=25, deadline=None)
@given(x=vectors())
def test_without_expansion_encoding_is_idempotent(codec, x):
    once = encode(x, codec)
    values = decode(once, codec, x.numel())
    # Those count as zero.
    assume(not (values.abs().nan_to_num(1.0) > 0).logical_and(values.abs() < TINY).any())
    twice = encode(values, codec)
    for mine, other in zip(twice, once, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_int8_codes_are_twos_complement():
    codec = MomentCodec("int8", expand=False)
    x = torch.arange(-127, 128).float()[torch.randperm(255)[:128]]
    x[0] = 127.0
    moment = encode(x, codec)
    assert moment.a == 127 and torch.equal(moment.q.view(torch.int8).view(-1).float(), x)
    ties = encode(torch.tensor([127.0, 2.5, -2.5, 3.5, 0.5]), codec).q.view(torch.int8)[0, :5]
    # A logarithm may move a tie.
    assert ((ties - torch.tensor([127, 2, -2, 4, 0])).abs() <= 1).all()


def test_log8_by_hand():
    """Eight octaves need ceil(250 * 8 / 253.75) = 8 steps of 1/250 octave: 8.0 / 0.032 = 250
    codes below 255.
    """
    codec = MomentCodec("log8", keep_nonzero=True)
    moment = encode(
        torch.tensor([1.0, 2.0**-8, 2.0**-4, 0.0, 2.0**-0.016 * 0.99, 2.0**-0.016 * 1.01]), codec
    )
    assert moment.k == 8 and moment.q[0, :6].tolist() == [255, 5, 130, 0, 254, 255]
    assert torch.allclose(
        decode(moment, codec, 3), torch.tensor([1.0, 2.0**-8, 2.0**-4]), rtol=1e-6
    )


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("log8",), "first moment: got 'log8', accepted: 'e4m3', 'e5m2', 'int8'"),
        (("int8", True, 128, True), "second moment: got 'int8', accepted: 'e4m3', 'e5m2', 'log8'"),
        (("fp8",), "got 'fp8'"),
        (("log8", False, 128, True), "expand: got False with log8"),
    ],
)
def test_codecs_that_do_not_exist(arguments, word):
    with pytest.raises(ValueError, match=word):
        MomentCodec(*arguments)


def test_zeros_is_the_encoding_of_zeros_and_takes_the_promised_bytes():
    for codec in CODECS:
        for n in (0, 1, codec.group_size + 1):
            assert equal(codec.zeros(n), encode(torch.zeros(n), codec))
    n = 128 * 1000
    assert sum(t.nbytes for t in MomentCodec().zeros(n)) == n + 3 * 1000


def test_input_is_not_changed_and_any_shape_and_dtype_is_taken_in_c_order():
    x = spread(6 * 50, 1.0).view(6, 50)
    for given_x in (x, x.t().contiguous().t(), x.bfloat16(), x.half()):
        before = given_x.clone()
        flat = encode(given_x.float().contiguous().view(-1), MomentCodec())
        assert equal(encode(given_x, MomentCodec()), flat)
        assert torch.equal(given_x, before)
