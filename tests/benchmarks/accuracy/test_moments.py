"""The numerics study measures what it says: rivals follow their definitions, errors are those of the formulas."""

import pytest
import torch

from benchmarks.accuracy.encodings import (
    coat,
    dynamic,
    flash_first_moment,
    flash_second_moment,
    plain_fp8,
    table,
    table_levels,
)
from benchmarks.accuracy.moments import COAT_TABLE_1, drift
from benchmarks.accuracy.snapshots import EPS, EXACT, Snapshot, Study, capture
from benchmarks.small_gpt import BETAS, Shape
from coat_dist.formats import E4M3
from coat_dist.reference.moments import MomentCodec, decode, encode

SMALL = Shape(vocabulary=64, hidden=32, layers=1, heads=2, ffn=48, sequence=16, batch=2)


def spread(n, sigma=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * torch.exp(sigma * torch.randn(n, generator=g))


def test_coat_is_the_packages_encoding():
    x = spread(1000)
    for second in (False, True):
        codec = MomentCodec(keep_nonzero=second)
        given = x.abs() if second else x
        assert torch.equal(coat(second=second).round_trip(given), decode(encode(given, codec), codec, 1000))
        package = codec.k_numerator / 16
        assert torch.equal(
            coat(second=second, log2_range=package).round_trip(given), coat(second=second).round_trip(given)
        )
        assert coat(second=second).bytes == 1 + 3 / 128
    noisy = coat(second=False, seed=1).round_trip(x)
    assert not torch.equal(noisy, coat(second=False).round_trip(x))
    assert torch.equal(noisy, coat(second=False, seed=1).round_trip(x))


def test_rivals_take_the_bytes_they_publish():
    assert flash_first_moment().bytes + flash_second_moment().bytes == 2.125
    assert 2 * dynamic(second=True).bytes == 2.03125
    assert 2 * plain_fp8("e4m3", 256).bytes == 2.03125


def test_flashoptim_by_hand():
    """1/3 compands to 2 * (1/3) / (4/3) = 1/2; its code is round(63.5) = 64; back: 64/127 / (2 - 64/127)."""
    m = torch.zeros(32)
    m[0], m[1], m[2] = 1.0, 1 / 3, -0.001
    decoded = flash_first_moment().round_trip(m)
    z = 64 / 127
    assert decoded[0] == 1 and decoded[1].item() == pytest.approx(z / (2 - z), rel=1e-6)
    assert decoded[2] == 0  # 2 * 0.001 * 127 is below one half
    v = torch.zeros(32)
    v[0], v[1], v[2] = 4.0, 1.0, 4 * (0.49 / 255) ** 2
    decoded = flash_second_moment().round_trip(v)
    assert decoded[0] == 4 and decoded[1].item() == pytest.approx((128 / 255 * 2) ** 2, rel=1e-6)
    assert decoded[2] == 0


def test_dynamic_has_256_levels_and_seven_decades():
    x = torch.linspace(-1, 1, 20001)
    signed = dynamic(second=False, group_size=len(x)).round_trip(x).unique()
    positive = torch.cat([torch.zeros(1), torch.logspace(-8, 0, 50000)])
    unsigned = dynamic(second=True, group_size=len(positive)).round_trip(positive).unique()
    assert signed.max() == 1 and signed.min() > -1
    assert len(unsigned) == 256 and unsigned[0] == 0 and unsigned[-1] == 1
    assert unsigned[1].item() == pytest.approx(0.325e-6, rel=1e-5)


def test_levels_of_code_tables():
    for kind, count in (("u-e4m4", 256), ("u-e5m3", 256), ("s-e4m3", 128)):
        levels = table_levels(kind)
        assert len(levels) == count and levels[0] == 0 and levels[-1] == 1 and (levels.diff() > 0).all()
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3.dtype).float()  # without the NaN
    mine = table_levels("s-e4m3")
    assert torch.allclose(mine[:127] / mine[126], codes / codes[126])


ENCODINGS_WITHOUT_A_SIGN = {
    "u-e4m4": table("u-e4m4", 16, second=True),
    "u-e5m3": table("u-e5m3", 32, second=True),
    "log8": coat("log8", second=True),
}


@pytest.mark.parametrize("kind", ENCODINGS_WITHOUT_A_SIGN)
def test_encodings_without_a_sign_bit_err_less_than_e4m3_and_lose_no_element(kind):
    v = spread(128 * 50, 2.0).square()
    squares = []
    for encoding in (coat(second=True), ENCODINGS_WITHOUT_A_SIGN[kind]):
        error = (encoding.round_trip(v) / v).log2()
        assert error.isfinite().all() and encoding.bytes == 1 + 3 / 128
        squares.append(error.square().mean())
    assert squares[1] < 0.35 * squares[0]
    assert torch.equal(encoding.round_trip(torch.zeros(130)), torch.zeros(130))
    assert (table("u-e4m4", 40, second=True).round_trip(v) > 0).all()  # codes that would be zero are raised


def test_drift_is_that_of_the_optimizer():
    rows = drift(steps=300, zeros=20, elements=2048, beta2s=(0.95, 0.999))
    assert len(rows) == 2 * 2 * 2
    at = {(r["beta2"], r["formats"], r["rounding"]): r for r in rows}
    for formats in ("e4m3, e4m3", "int8, log8"):
        low, high = ([at[beta2, formats, r] for r in (False, True)] for beta2 in (0.95, 0.999))
        assert high[0]["v"] > 0.3 > abs(high[1]["v"])
        assert abs(low[0]["v"]) < 0.1 > abs(low[1]["v"])
        assert low[0]["v_after_zeros"] > 0.06 > abs(low[1]["v_after_zeros"])
        assert low[0]["update"] < low[1]["update"] < 1  # in one step nearest is best
        assert high[1]["update"] < high[0]["update"] < 1
    assert at[0.999, "int8, log8", True]["fp32_falls_by"] == pytest.approx(0.02887, rel=1e-3)


def test_errors_are_the_formulas():
    n = 300
    m, v, grad = spread(n), spread(n, seed=1).square(), spread(n, seed=2)
    study = Study({5: Snapshot(m, v, grad, [100, n])})
    assert set(study.errors([m], [v]).values()) == {0.0}
    wrong_m, wrong_v = m * 1.1, v * 0.5
    errors = study.errors([wrong_m], [wrong_v])

    def relative(got, exact):
        return ((got - exact).double().square().sum() / exact.double().square().sum()).item()

    def update(m, v):
        return m / (v.sqrt() + EPS)

    assert errors["table1"] == pytest.approx(relative(update(wrong_m, wrong_v), update(m, v)), rel=1e-5)
    tail = slice(100, None)
    assert errors["table1_no_embedding"] == pytest.approx(
        relative(update(wrong_m[tail], wrong_v[tail]), update(m[tail], v[tail])), rel=1e-5
    )
    b1, b2 = BETAS
    after = [update(b1 * a + (1 - b1) * grad, b2 * b + (1 - b2) * grad**2) for a, b in ((wrong_m, wrong_v), (m, v))]
    assert errors["next"] == pytest.approx(relative(*after), rel=1e-5)


def test_each_matrix_is_encoded_on_its_own():
    m, v = spread(300), spread(300, seed=1).square()
    study = Study({5: Snapshot(m, v, m, [100, 300])})
    encoding = coat(second=False)
    expected = torch.cat([encoding.round_trip(m[:100]), encoding.round_trip(m[100:])])
    assert torch.equal(study.decoded("m", encoding)[0], expected)
    assert torch.equal(study.decoded("v", EXACT)[0], v)


def test_capture_takes_the_moments_and_the_gradient_that_follows(monkeypatch):
    monkeypatch.setattr("benchmarks.accuracy.snapshots.Shape", lambda: SMALL)
    tokens = torch.randint(64, (5000,), generator=torch.Generator().manual_seed(0))
    taken = capture(50, tokens)
    assert sorted(taken) == [2, 10, 25, 49]
    assert all(
        s.first_moment.numel() == s.bounds[-1] == s.gradient.numel() and s.second_moment.min() >= 0
        for s in taken.values()
    )
    beta1, beta2 = BETAS  # moments after one step more follow from the snapshot
    longer = capture(50, tokens)[10]
    assert torch.equal(longer.first_moment, taken[10].first_moment)
    monkeypatch.setattr("benchmarks.accuracy.snapshots.SHARES", (0.2, 0.22))
    both = capture(50, tokens)
    assert torch.allclose(
        both[11].first_moment, beta1 * both[10].first_moment + (1 - beta1) * both[10].gradient, atol=1e-9
    )
    assert torch.allclose(
        both[11].second_moment, beta2 * both[10].second_moment + (1 - beta2) * both[10].gradient ** 2, atol=1e-12
    )


def test_published_table_has_the_ratio_of_the_papers_choice():
    assert COAT_TABLE_1[1][1] / COAT_TABLE_1[0][0] == min(map(min, COAT_TABLE_1)) / 20.10
