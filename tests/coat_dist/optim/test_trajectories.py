"""Where CoatAdamW takes parameters beside torch's fp32 AdamW, in groups of elements of unlike size.

Errors of one encoding cannot show a moment that never decays: what is lifted in every step grows.
"""

import copy
import functools

import pytest
import torch

from benchmarks.accuracy.encodings import first_moment_range
from benchmarks.accuracy.trajectories import Gradients, Options, decaying, ratios, sparse, stopped, train
from coat_dist.optim import CoatAdamW, export_moments

FORMATS = {"e4m3": "e4m3", "e5m2": "e5m2", "int8": "log8"}
N, STEPS = 1024, 100
ERROR = {
    "stopped": {"e4m3": 0.4, "e5m2": 0.25, "int8": 0.8},
    "sparse": dict.fromkeys(FORMATS, 0.08),
    "decaying": dict.fromkeys(FORMATS, 0.08),
}
"""Of displacements, root mean square, relative. Measured: up to 0.31, 0.15 and 0.57; 0.06; 0.06."""
MOVED = {"stopped": 0.3, "sparse": 0.03, "decaying": 0.03}
"""How far the mean displacement may be from that of fp32 AdamW, relative."""


@functools.cache
def scenarios() -> dict[str, Gradients]:
    """Each fills whole groups of every size, so that one parameter can hold all of them."""
    return {
        "stopped": stopped(N, steps=STEPS),
        "sparse": sparse(N, steps=STEPS),
        "decaying": decaying(N, factor=0.5, steps=STEPS),
    }


def measured(options: Options) -> dict[str, dict[str, float]]:
    """``moved`` and ``error`` of each scenario."""
    coded, exact, *_ = train(torch.cat([g.steps for g in scenarios().values()], 1), options)
    out = {}
    for i, (name, gradients) in enumerate(scenarios().items()):
        mine = slice(i * N, (i + 1) * N)
        out[name] = ratios(coded[mine][gradients.watched], exact[mine][gradients.watched])
    return out


@pytest.mark.parametrize("rounding", [False, "auto", True])
@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize("first", FORMATS)
def test_parameters_go_where_fp32_adamw_takes_them(first, group_size, rounding):
    found = measured(Options(first, FORMATS[first], group_size=group_size, rounding=rounding))
    for name, ratio in found.items():
        assert ratio["error"] <= ERROR[name][first] and abs(ratio["moved"] - 1) <= MOVED[name], (name, ratio)


@pytest.mark.parametrize("rounding", [False, "auto", True])
@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize("first", ["e4m3", "e5m2"])
def test_these_bounds_do_not_hold_for_a_range_that_lifts_the_smallest_element(first, group_size, rounding):
    """R = 2 F**2 puts it at 0.57 code steps. Rounded stochastically it is too often zero instead."""
    found = measured(Options(first, FORMATS[first], factor=2.0, group_size=group_size, rounding=rounding))
    for name in ("stopped", "sparse"):
        assert found[name]["error"] > ERROR[name][first], (name, found[name])
    if rounding is not True:
        assert found["stopped"]["moved"] > 3
        assert first != "e4m3" or found["decaying"]["error"] > ERROR["decaying"][first]


@pytest.mark.parametrize("second", ["e4m3", "e5m2", "log8"])
def test_the_second_moment_of_elements_that_stopped_falls_where_it_is_rounded_stochastically(second):
    """To nearest it does not fall at all (docs/numerics.md): with torch's default beta2 "auto" does not round so."""
    gradients, v = scenarios()["stopped"], {}
    for rounding in ("auto", False):
        *_, coded, exact = train(gradients.steps, Options(second=second, rounding=rounding))
        v[rounding] = (coded / exact)[gradients.watched].log2().mean().item()
    assert abs(v["auto"]) < 0.5 and v[False] > 0.5 > v["auto"]


@pytest.mark.parametrize("first", ["e4m3", "e5m2"])
def test_a_state_that_was_written_with_another_range_is_read_as_it_was_meant(first):
    """The spacing of codes is stored with each group, so decoding does not depend on R."""
    gradients = stopped(N, steps=8).steps

    def build():
        p = torch.nn.Parameter(torch.zeros(N))
        return p, CoatAdamW([p], first_moment=first, second_moment=first)

    p, old = build()
    with first_moment_range(2.0):
        for gradient in gradients:
            p.grad = gradient.clone()
            old.step()
        meant = export_moments(p, old.state[p], old.param_groups[0])
    q, new = build()
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for key in ("coat_m_q", "coat_m_a", "coat_m_k"):
        assert torch.equal(new.state[q][key], old.state[p][key])
    for mine, theirs in zip(export_moments(q, new.state[q], new.param_groups[0]), meant, strict=True):
        assert torch.equal(mine, theirs)
    before = new.state[q]["coat_m_k"].clone()
    q.grad = gradients[-1].clone()
    new.step()
    assert (new.state[q]["coat_m_k"] < before).all(), "the next step encodes with the package's range"
