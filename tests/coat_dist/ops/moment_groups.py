"""Groups that moments may hold, and what their encoding may do to them; for the tests of
``reference/moments.py``.
"""

import hypothesis.strategies as st
import torch

from coat_dist.reference.moment_formats import LOG8_SPAN
from coat_dist.reference.moments import TINY, MomentCodec, decode

FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
FP8_CODECS = [
    MomentCodec(f, e, g, n)
    for f in ("e4m3", "e5m2")
    for e in (True, False)
    for g in (64, 128, 256)
    for n in (True, False)
]
CODECS = FP8_CODECS + [
    codec
    for g in (64, 128, 256)
    for codec in (
        MomentCodec("int8", True, g),
        MomentCodec("int8", False, g),
        MomentCodec("log8", True, g, True),
    )
]


def magnitudes():
    """fp32 magnitudes: zeros, subnormals, the ends of the range, repeats, and every scale
    between.
    """
    return st.one_of(
        st.sampled_from(
            [
                0.0,
                1e-45,
                1e-39,
                TINY,
                1.2e-38,
                1e-30,
                1e-8,
                1.0,
                1.0 - 2**-9,
                1.0 + 2**-8,
                448.0,
                3.3895e38,
                3.395e38,
                FP32_MAX,
            ]
        ),
        st.floats(0, FP32_MAX, width=32),
        st.tuples(st.floats(1, 2, width=32), st.integers(-126, 126)).map(
            lambda p: p[0] * 2.0 ** p[1]
        ),
    )


def vectors():
    """Flat tensors: a few distinct magnitudes, drawn with repetition, of lengths around the
    group sizes.
    """
    return st.builds(
        lambda values, n, seed, signed: _draw(values, n, seed, signed),
        st.lists(magnitudes(), min_size=1, max_size=6),
        st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 300]),
        st.integers(0, 2**31),
        st.booleans(),
    )


def _draw(values, n, seed, signed):
    g = torch.Generator().manual_seed(seed)
    x = torch.tensor(values, dtype=torch.float32)[torch.randint(len(values), (n,), generator=g)]
    return x * (torch.randint(2, (n,), generator=g) * 2 - 1) if signed else x


def spread(n, sigma, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * torch.exp(sigma * torch.randn(n, generator=g))


def groups_of(x, size):
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def exact_y(x, moment, codec):
    """What rounding gets, in fp64 from the stored a and k."""
    ratio = (groups_of(x.double().abs(), codec.group_size) / moment.a.double()[:, None]).clamp(
        max=1.0
    )
    k = moment.k.double()[:, None]
    if codec.format == "log8":
        return torch.where(ratio > 0, 255 + torch.log2(ratio) * 250 / k, 0.0)
    return codec.kind.max * ratio ** (k / (64 if codec.format == "int8" else 16))


def half_step(y, codec):
    """Largest relative error of rounding y to nearest."""
    if codec.format == "int8":
        return 1 / (2 * y)
    fp8 = codec.kind.fp8
    normal = fp8.smallest * 2**fp8.mantissa_bits
    return torch.where(y >= normal, 2.0 ** -(fp8.mantissa_bits + 1), fp8.smallest / (2 * y))


def stored(q, codec):
    """Magnitudes that codes stand for before the spread is undone, fp64."""
    if codec.format == "log8":
        return q.double()
    return q.view(torch.int8 if codec.format == "int8" else codec.kind.fp8.dtype).double().abs()


def assert_within_bound(x, moment, codec, steps=1.0):
    y = exact_y(x, moment, codec)
    wide = groups_of(x.double().abs(), codec.group_size)
    decoded = groups_of(decode(moment, codec, x.numel()), codec.group_size).double().abs()
    kept = (wide >= TINY) & (decoded > 0) & (wide <= BF16_MAX)
    k = moment.k.double()[:, None]
    if codec.format == "log8":
        bound = (steps * k / 500 + 1e-4).expand_as(y)
    else:
        d = (steps * half_step(y, codec)).clamp(max=0.9)
        bound = -torch.log2(1 - d) * codec.unit / k + 1e-4
    error = torch.log2(decoded / wide).abs()
    assert (error[kept] <= bound[kept]).all()


def assert_metadata(x, moment, codec):
    """a is the amax rounded up (from 2**-17 above a bf16 number on), k as large (the step as small)
    as the group's spread allows.
    """
    zero = x.abs() < TINY
    amax = groups_of(x.abs().where(~zero, 0.0), codec.group_size).amax(1)
    a = moment.a.float()
    assert ((a >= amax * (1 - 2**-17)) | (a == BF16_MAX)).all()
    assert (a <= torch.maximum(amax * (1 + 2**-7), amax + 1e-45)).all()
    k = moment.k.double()
    assert (k >= 1).all()
    if codec.expand:
        grouped = groups_of(x.double().abs(), codec.group_size)
        bottom = grouped.where(grouped >= TINY, torch.inf).amin(1)
        spread = torch.where(amax > 0, (a.double() / bottom).log2(), 0.0)
        # No ratios are taken for wider.
        spread = spread.clamp(max=8.0) if codec.over_root else spread
        if codec.format == "log8":
            assert (spread <= LOG8_SPAN * k / 250 + 1e-3).all()
            assert ((spread > LOG8_SPAN * (k - 1) / 250 - 1e-3) | (k == 1)).all()
        else:
            log2_range = codec.k_numerator / codec.unit
            assert ((spread * k / codec.unit <= log2_range + 1e-3) | (k == 1)).all()
            assert ((spread * (k + 1) / codec.unit > log2_range - 1e-3) | (k == 255)).all()
    else:
        assert (k == codec.unit).all()
