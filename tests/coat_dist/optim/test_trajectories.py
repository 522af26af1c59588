"""Where CoatAdamW takes parameters beside torch's fp32 AdamW, in groups of elements of unlike size.

Errors of one encoding cannot show a moment that never decays: what is lifted in every step grows.
Bounds are a fifth above the largest of what was measured, or what docs/numerics.md promises,
whichever is less; for each there is an encoding that is known to be worse and breaks it.
"""

import functools

import pytest

from benchmarks.accuracy.trajectories import BETAS, Joined, Options
from benchmarks.accuracy.trajectory_gradients import decaying, normal, sparse, stopped
from tests.support import slow

FORMATS = {"e4m3": "e4m3", "e5m2": "e5m2", "int8": "log8"}
PAIRS = [*FORMATS.items(), ("e4m3", "log8")]
N, STEPS = 512, 100
SIZES = [slow(64), 128, slow(256)]
STOPPED = ("stopped", "stopped at 1e-7", "beside constants", "both")
ERROR = {
    **dict.fromkeys(("random", "huge", "tiny"), 0.045),
    "spread": 0.07,
    "sparse": 0.05,
    **dict.fromkeys(STOPPED, 0.13),
    "decaying": 0.06,
}
"""Of displacements, root mean square, relative."""
MOVED = 0.04
MOVED_STOPPED = 0.12
"""How far the mean displacement may be from that of fp32 AdamW, relative."""
NEAREST, FARTHEST = 0.75, 1.25
"""Displacement of single elements whose gradients stop over that of fp32 AdamW."""


@functools.cache
def scenarios() -> Joined:
    """Each fills whole groups of every size, so that one parameter can hold all of them."""
    return Joined(
        {
            "random": normal(N, STEPS),
            "huge": normal(N, STEPS, size=1e18),
            "tiny": normal(N, STEPS, size=1e-20),
            "spread": normal(N, STEPS, octaves=1.5),
            "sparse": sparse(N, steps=STEPS),
            "stopped": stopped(N, steps=STEPS),
            "stopped at 1e-7": stopped(N, small=1e-7, steps=STEPS),
            "beside constants": stopped(N, constant=True, steps=STEPS),
            "both": stopped(N, small=1e-7, constant=True, steps=STEPS),
            "decaying": decaying(N, factor=0.5, steps=STEPS),
        }
    )


def broken(found: dict[str, dict[str, float]]) -> set[str]:
    """Scenarios in which an element or all of them are farther from fp32 AdamW than they may be."""
    out = set()
    for name, one in found.items():
        moved = MOVED_STOPPED if name in STOPPED else MOVED
        right = one["error"] <= ERROR[name] and abs(one["moved"] - 1) <= moved
        out |= (
            set()
            if right and one.get("nearest", 1) >= NEAREST and one.get("farthest", 1) <= FARTHEST
            else {name}
        )
    return out


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("pair", PAIRS)
def test_parameters_go_where_fp32_adamw_takes_them(pair, betas):
    found = scenarios().compare(Options(*pair, betas))
    assert not broken(found), found


@pytest.mark.parametrize("group_size", [64, 256])
@pytest.mark.parametrize("first", FORMATS)
def test_so_they_do_with_other_group_sizes(first, group_size):
    found = scenarios().compare(
        Options(first, FORMATS[first], group_size=group_size, rounding=True)
    )
    assert not broken(found), found


FORMER_ERROR = {
    "stopped": {"e4m3": 0.4, "e5m2": 0.25, "int8": 0.8},
    "sparse": dict.fromkeys(FORMATS, 0.08),
    "decaying": dict.fromkeys(FORMATS, 0.08),
}
FORMER_MOVED = {"stopped": 0.3, "sparse": 0.03, "decaying": 0.03}


@functools.cache
def former_scenarios() -> Joined:
    return Joined(
        {
            "stopped": stopped(1024, steps=STEPS),
            "sparse": sparse(1024, steps=STEPS),
            "decaying": decaying(1024, factor=0.5, steps=STEPS),
        }
    )


@pytest.mark.parametrize("rounding", [False, "auto", True])
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("first", FORMATS)
def test_moments_that_are_stored_by_themselves_keep_the_bounds_they_had(
    first, group_size, rounding
):
    options = Options(
        first, FORMATS[first], group_size=group_size, rounding=rounding, normalize=False
    )
    for name, ratio in former_scenarios().compare(options).items():
        assert ratio["error"] <= FORMER_ERROR[name][first], (name, ratio)
        assert abs(ratio["moved"] - 1) <= FORMER_MOVED[name], (name, ratio)


BIAS = 0.1


@functools.cache
def unlike(steps: int) -> Joined:
    return Joined({"spread": normal(N, steps, octaves=1.5), "sparse": sparse(N, steps=steps)})


@pytest.mark.parametrize("beta2, steps", [(0.9, 60), (0.95, 200), (0.99, 200), (0.999, 400)])
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[2], *map(slow, PAIRS[1::2])])
def test_second_moments_are_not_biased(pair, beta2, steps):
    for name, found in unlike(steps).compare(Options(*pair, (0.9, beta2))).items():
        assert abs(found["v"]) <= BIAS, (name, found)


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS[:3:2])
def test_the_kernel_goes_there_too(pair, monkeypatch):
    kernels = pytest.importorskip("coat_dist.kernels.adamw")
    called = []
    monkeypatch.setattr(
        "coat_dist.optim.adamw.adamw_steps", lambda *a: (called.append(1), kernels.adamw_steps(*a))
    )
    short = Joined(
        {"beside constants": stopped(256, constant=True, steps=24), "random": normal(256, 24)}
    )
    found = short.compare(Options(*pair))
    assert len(called) == 24 and not broken(found), found
    assert broken(short.compare(Options(*pair, normalize=False))) == {"beside constants"}
