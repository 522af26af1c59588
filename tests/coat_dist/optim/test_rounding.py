"""When codes are rounded stochastically, and what that does to a second moment over many steps."""

import copy

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_moments

from .common import make, train

N = 4096
FORMATS = [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8", "log8")]


def codes(optimizer, which, i=0):
    return list(optimizer.state.values())[i][f"coat_{which}_q"]


def formats(pair):
    return dict(zip(("first_moment", "second_moment"), pair, strict=True))


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.98), (0.9, 0.999)])
@pytest.mark.parametrize("pair", FORMATS)
def test_auto_is_one_of_the_other_two_in_each_moment_whatever_the_betas(pair, betas):
    runs = {}
    for option in (True, False, "auto"):
        p, optimizer = make(N, betas=betas, stochastic_rounding=option, **formats(pair))
        train(optimizer, [p], 3)
        runs[option] = p, optimizer
    keys = {option: set(optimizer.state[p]) for option, (p, optimizer) in runs.items()}
    assert keys["auto"] == keys[True] and keys["auto"] - keys[False] == {"coat_seed"}
    (p, auto), (q, both) = runs["auto"], runs[True]
    assert torch.equal(codes(auto, "v"), codes(both, "v")), "noise of the second is that of true"
    assert (
        torch.equal(codes(auto, "m"), codes(both, "m")) is torch.equal(p, q) is (pair[0] == "int8")
    )
    for which in "mv":
        assert not torch.equal(codes(auto, which), codes(runs[False][1], which)), which


@pytest.mark.parametrize("normalize", [False, True])
def test_groups_go_by_their_own_rounding(normalize):
    """The first moment of "auto" is rounded to nearest. After one step its codes do not depend on
    what was stored of the second.
    """
    torch.manual_seed(0)
    start = torch.randn(2, 4096)

    def build(*options):
        groups = [
            {"params": [torch.nn.Parameter(x.clone())], "stochastic_rounding": option}
            for x, option in zip(start, options, strict=True)
        ]
        return CoatAdamW(groups, normalize=normalize)

    runs = {options: build(*options) for options in ((True, True), (False, False), ("auto", False))}
    for optimizer in runs.values():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        train(optimizer, params, 1)
    mixed = runs["auto", False]
    assert torch.equal(codes(mixed, "v", 0), codes(runs[True, True], "v", 0))
    assert torch.equal(codes(mixed, "v", 1), codes(runs[False, False], "v", 1))
    assert not torch.equal(codes(mixed, "v", 1), codes(runs[True, True], "v", 1))
    assert all(torch.equal(codes(mixed, "m", i), codes(runs[False, False], "m", i)) for i in (0, 1))


def test_an_option_that_is_changed_counts_from_the_next_step_on():
    (p, auto), (q, nearest) = (
        make(N, betas=(0.9, 0.95), stochastic_rounding=o) for o in ("auto", False)
    )
    train(auto, [p], 2)
    nearest.load_state_dict(
        {**copy.deepcopy(auto.state_dict()), "param_groups": nearest.state_dict()["param_groups"]}
    )
    with torch.no_grad():
        q.copy_(p)
    auto.param_groups[0]["stochastic_rounding"] = False
    for one, optimizer in ((p, auto), (q, nearest)):
        train(optimizer, [one], 1, seed=2)
    assert torch.equal(p, q)
    assert all(torch.equal(codes(auto, which), codes(nearest, which)) for which in "mv")
    auto.param_groups[0]["stochastic_rounding"] = "auto"
    for one, optimizer in ((p, auto), (q, nearest)):
        train(optimizer, [one], 1, seed=3)
    assert not torch.equal(codes(auto, "v"), codes(nearest, "v"))


@pytest.mark.long
@pytest.mark.parametrize("pair", FORMATS)
def test_the_default_second_moment_follows_at_torchs_default_beta2(pair):
    """fp32 and 8-bit codes from the same gradients: rounding to nearest ends far above, the
    default does not.
    """
    torch.manual_seed(0)
    auto, nearest, exact = (torch.nn.Parameter(torch.zeros(2048)) for _ in range(3))
    options = ({"stochastic_rounding": "auto"}, {"stochastic_rounding": False}, {"moments": "fp32"})
    groups = [{"params": [p], **o} for p, o in zip((auto, nearest, exact), options, strict=True)]
    optimizer = CoatAdamW(groups, lr=0.0, **formats(pair))
    deviation = torch.exp(torch.randn(2048))
    for _ in range(1200):
        auto.grad = nearest.grad = exact.grad = deviation * torch.randn(2048)
        optimizer.step()

    def drift(p, group):
        v = export_moments(p, optimizer.state[p], group)[1]
        return (v / optimizer.state[exact]["exp_avg_sq"]).log2().mean().item()

    assert (
        abs(drift(auto, optimizer.param_groups[0])) < 0.3
        and drift(nearest, optimizer.param_groups[1]) > 1.0
    )
