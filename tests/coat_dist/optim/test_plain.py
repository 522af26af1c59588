"""What a torch program may expect of any optimizer: hooks, schedulers, gradient scaling, groups,
state in fp32.
"""

import copy
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from coat_dist.optim import CoatAdamW, fp32_state_dict
from tests.coat_dist.optim.common import assert_same_state, equal_bytes, make, train


def pair(**options):
    """Two equal problems with FP8 and fp32 moments."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((20, 30), (129,), (5,))]
        groups = [{"params": params[:2]}, {"params": params[2:], "moments": "fp32"}]
        found.append((params, CoatAdamW(groups, **{"lr": 0.01, **options})))
    return found


SCHEDULERS = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=12),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_lr_and_betas_and_resume(name):
    (params, one), (others, two) = pair()
    schedule = SCHEDULERS[name](one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if its step counter does not see the optimizer
        for step in range(3):
            train(one, params, 1, seed=step)
            schedule.step()
    saved = copy.deepcopy([one.state_dict(), schedule.state_dict(), [p.detach() for p in params]])
    other_schedule = SCHEDULERS[name](two)
    two.load_state_dict(saved[0])
    other_schedule.load_state_dict(saved[1])
    with torch.no_grad():
        for p, old in zip(others, saved[2], strict=True):
            p.copy_(old)
    rates = []
    for optimizer, ps, s in ((one, params, schedule), (two, others, other_schedule)):
        for step in range(3):
            train(optimizer, ps, 1, seed=9 + step)
            s.step()
        rates.append([(g["lr"], tuple(g["betas"])) for g in optimizer.param_groups])
    assert rates[0] == rates[1] and rates[0][0][0] != 0.01
    assert (rates[0][0][1] != (0.9, 0.999)) == (name == "OneCycleLR")
    assert_same_state(one, two)
    assert all(equal_bytes(a, b) for a, b in zip(params, others, strict=True))


def test_fp32_state_dict_refuses_what_does_not_fit():
    p, optimizer = make(1000)
    train(optimizer, [p], 3)
    _, other = make(1000, group_size=64, second_moment="e5m2")
    with fp32_state_dict(optimizer):
        saved = optimizer.state_dict()
    with pytest.raises(
        ValueError, match="second_moment: got .e4m3., accepted: .e5m2.*fp32_state_dict"
    ):
        other.load_state_dict(optimizer.state_dict())
    with fp32_state_dict(other), pytest.raises(ValueError, match="accepted under fp32_state_dict"):
        other.load_state_dict(optimizer.state_dict())
    with (
        fp32_state_dict(other),
        pytest.raises(ValueError, match=r"exp_avg: got torch.float32 \[3\]"),
    ):
        damaged = {**saved["state"][0], "exp_avg": torch.zeros(3)}
        other.load_state_dict({**saved, "state": {0: damaged}})


def test_from_torchs_adamw_and_back():
    """A run that changes the optimizer half-way: moments, steps and options carry over both
    ways.
    """
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(500))
    theirs = torch.optim.AdamW([p], lr=0.05, betas=(0.8, 0.9))
    train(theirs, [p], 3)
    q = torch.nn.Parameter(p.detach().clone())
    ours = CoatAdamW([q])
    with fp32_state_dict(ours):
        ours.load_state_dict(theirs.state_dict())
    assert (ours.param_groups[0]["lr"], tuple(ours.param_groups[0]["betas"])) == (0.05, (0.8, 0.9))
    assert "amsgrad" not in ours.param_groups[0] and ours.param_groups[0]["moments"] == "fp8"
    assert ours.state[q]["step"] == 3
    with fp32_state_dict(ours):
        back = ours.state_dict()
    again = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone())])
    again.load_state_dict(back)
    for optimizer, x in ((theirs, p), (ours, q), (again, again.param_groups[0]["params"][0])):
        train(optimizer, [x], 1, seed=8)
    moved = (p - q).abs().max(), (p - again.param_groups[0]["params"][0]).abs().max()
    assert max(moved) < 0.05 * 0.1  # a tenth of a step of size lr
