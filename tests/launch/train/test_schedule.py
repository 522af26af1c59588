"""Learning-rate schedule: end points, shapes, purity, errors."""

import math

import pytest

from launch.train.plan import Schedule


def test_warmup_ends_at_the_peak_and_decay_at_the_minimum():
    for kind in ("cosine", "linear"):
        s = Schedule(lr=3e-4, min_lr=3e-5, warmup_steps=10, decay_steps=100, kind=kind)
        assert s(10) == 3e-4
        assert s(1) == 3e-4 / 10
        assert s(100) == pytest.approx(3e-5, rel=1e-12)
        assert s(1000) == s(100)
        values = [s(i) for i in range(10, 101)]
        assert values == sorted(values, reverse=True)
        assert len(set(values)) == len(values)


def test_shapes():
    cosine, linear = (Schedule(lr=1.0, decay_steps=100, kind=kind) for kind in ("cosine", "linear"))
    assert cosine(50) == pytest.approx(0.5) and cosine(25) == pytest.approx(
        0.5 * (1 + math.cos(math.pi / 4))
    )
    assert linear(25) == pytest.approx(0.75) and linear(1) == pytest.approx(0.99), (
        "near the peak without warm-up"
    )
    constant = Schedule(lr=0.1, warmup_steps=4, kind="constant")
    assert [constant(i) for i in (2, 4, 5, 10**9)] == [0.05, 0.1, 0.1, 0.1]
