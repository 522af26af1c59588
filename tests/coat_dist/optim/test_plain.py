"""What a torch program may expect of any optimizer: hooks, schedulers, gradient scaling, groups,
state in fp32.
"""

import copy
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from coat_dist.optim import CoatAdamW, export_moments, fp32_state_dict
from tests.coat_dist.optim.common import assert_same_state, equal_bytes, make, train

KINDS = ["fp8", "fp32"]


def pair(**options):
    """Two equal problems with FP8 and fp32 moments."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((20, 30), (129,), (5,))]
        groups = [{"params": params[:2]}, {"params": params[2:], "moments": "fp32"}]
        found.append((params, CoatAdamW(groups, **{"lr": 0.01, **options})))
    return found


@pytest.mark.parametrize("moments", KINDS)
def test_a_learning_rate_tensor_is_read_in_every_step(moments):
    lr = torch.tensor(0.125)
    (params, one), (others, two) = pair(lr=lr)[0], pair(lr=0.125)[1]
    for optimizer in (one, two):
        optimizer.param_groups[0]["moments"] = moments
    train(one, params, 2)
    train(two, others, 2)
    lr.fill_(0.5)
    for g in two.param_groups:
        g["lr"] = 0.5
    train(one, params, 2, seed=4)
    train(two, others, 2, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


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


def test_parameters_of_different_age_in_one_group():
    """What shares a launch must share the step: a parameter that sat out a step has its own bias
    correction.
    """
    for moments in KINDS:
        params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(3)]
        together = CoatAdamW(
            [{"params": params, "moments": moments}], lr=0.1, stochastic_rounding=False
        )
        copies = [torch.nn.Parameter(torch.zeros(64)) for _ in range(3)]
        alone = [
            CoatAdamW([{"params": [p], "moments": moments}], lr=0.1, stochastic_rounding=False)
            for p in copies
        ]
        for step, present in enumerate([(1, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 1)]):
            for i, (p, q) in enumerate(zip(params, copies, strict=True)):
                torch.manual_seed(10 * step + i)
                p.grad = torch.randn(64) if present[i] else None
                q.grad = None if p.grad is None else p.grad.clone()
            together.step()
            for optimizer in alone:
                optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))
        assert [together.state[p]["step"] for p in params] == [4, 2, 2]


def test_fp32_state_dict_changes_the_layout():
    p, optimizer = make(1000)
    train(optimizer, [p], 3)
    q, other = make(1000, group_size=64, second_moment="e5m2")
    with fp32_state_dict(optimizer), fp32_state_dict(other):
        saved = optimizer.state_dict()
        other.load_state_dict(saved)
    assert other.param_groups[0]["group_size"] == 64 and other.state[q]["coat_m_q"].shape == (
        16,
        64,
    )
    wanted = [saved["state"][0][k] for k in ("exp_avg", "exp_avg_sq")]
    for got, exact, half_step in zip(
        export_moments(q, other.state[q], other.param_groups[0]),
        wanted,
        (2**-4, 2**-3),
        strict=True,
    ):
        assert torch.allclose(
            got, exact, rtol=half_step * 1.01, atol=float(exact.abs().max()) * 1e-3
        )
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
    with (
        pytest.raises(TypeError, match="got AdamW, accepted: CoatAdamW"),
        fp32_state_dict(torch.optim.AdamW([p])),
    ):
        pass


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


def test_stepping_with_fp32_state_of_torch_is_refused_without_the_context():
    p, ours = make()
    theirs = torch.optim.AdamW([p])
    train(theirs, [p], 1)
    with pytest.raises(ValueError, match="fp32_state_dict"):
        ours.load_state_dict(theirs.state_dict())
    amsgrad = torch.optim.AdamW([p], amsgrad=True)
    train(amsgrad, [p], 1)
    with fp32_state_dict(ours), pytest.raises(ValueError, match="max_exp_avg_sq"):
        ours.load_state_dict(amsgrad.state_dict())
