"""``safe_get_full_moment``, ``safe_set_full_moment``; DeepSpeed's own accessors give moments or
raise, never codes.
"""

from functools import partial

import pytest
import torch

import coat_dist
from tests.coat_dist.checkpoint.universal_runs import build
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks

KINDS = {"exp_avg": "first", "exp_avg_sq": "second"}
"""DeepSpeed's names of moments, and ours."""


def set_both(rank, world, settings, by):
    """What is wrong after moments were set over unlike ones, in both orders: relative errors of
    what was set, and changes of all but what shares a group of 128 elements.
    """
    from deepspeed import utils

    get = {
        "ours": lambda p, key: coat_dist.safe_get_full_moment(p, KINDS[key]),
        "DeepSpeed's": utils.safe_get_full_optimizer_state,
        "local": utils.safe_get_local_optimizer_state,
    }[by]
    put = {
        "ours": lambda p, value, key: coat_dist.safe_set_full_moment(p, value, KINDS[key]),
        "DeepSpeed's": utils.safe_set_full_optimizer_state,
        "local": utils.safe_set_local_optimizer_state,
    }[by]
    engine, problems = build(settings), []
    losses = run(engine, rank, 0, 1)
    # The matrices share a group of 128 elements; a local part of the vector has padding.
    names = ["up.weight", "down.weight", *["norm.weight"] * (by != "local")]
    params = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    chosen = [params[name] for name in names]
    others = {(n, kind): params[n] for n in params.keys() - names for kind in KINDS.values()}
    for orders in (("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg")):
        before = {at: coat_dist.safe_get_full_moment(p, at[1]) for at, p in others.items()}
        torch.manual_seed(7 if by != "local" else 7 + rank)
        shapes = [get(p, "exp_avg").shape for p in chosen]
        for p, shape in zip(chosen, shapes, strict=True):
            put(p, 10 ** (6 * torch.rand(shape) - 3), "exp_avg_sq")
        wanted = [{"exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s) + 0.5} for s in shapes]
        for key in orders:
            for p, values in zip(chosen, wanted, strict=True):
                put(p, values[key], key)
        for name, p, values in zip(names, chosen, wanted, strict=True):
            for key, value in values.items():
                error = float((get(p, key) - value).norm() / value.norm())
                if not error <= (0.0 if name == "norm.weight" else 0.03):
                    problems.append(f"{name} {key}: off by {error}")
        for at, p in others.items():
            changed = (coat_dist.safe_get_full_moment(p, at[1]) != before[at]).sum()
            if changed > (256 if before[at].ndim > 1 else 0):
                problems.append(f"{changed} elements of {at} changed")
        losses += run(engine, rank, 1, 2)
    return problems + [f"loss {x}" for x in losses if not 0 < x < 10]


@pytest.mark.parametrize(
    ("case", "by"),
    [
        ("zero-1", "ours"),
        ("zero-1", "DeepSpeed's"),
        ("zero-1, BF16_Optimizer", "ours"),
        ("zero-2", "DeepSpeed's"),
        ("zero-3", "DeepSpeed's"),
        ("zero-3", "local"),
        ("zero-3, sub-groups", "ours"),
    ],
)
def test_safe_set_full_moment_changes_one_parameter_in_either_order(case, by):
    assert run_ranks(2, set_both, CASES[case], by) == [[], []]


def frozen(rank, world, settings):
    """As with torch's AdamW: no state, and nothing is set."""
    from deepspeed import utils

    engine = build(settings)
    run(engine, rank, 0, 1)
    p, before = engine.module.frozen.weight, snapshot(engine)
    ones = torch.ones(getattr(p, "ds_shape", p.shape))
    assert utils.safe_get_full_optimizer_state(p, "exp_avg") is None
    assert utils.safe_get_full_fp32_param(p) is None
    utils.safe_set_full_optimizer_state(p, ones, "exp_avg_sq")
    if hasattr(p, "ds_id"):
        assert utils.safe_get_local_optimizer_state(p, "exp_avg") is None
        assert utils.safe_get_local_fp32_param(p) is None
        utils.safe_set_local_optimizer_state(p, ones, "exp_avg")
        p.requires_grad_(True)  # too late
        with pytest.raises(ValueError, match="no CoatAdamW under ZeRO trains"):
            utils.safe_get_local_optimizer_state(p, "exp_avg")
        p.requires_grad_(False)
    assert changes(before, snapshot(engine)) == []


@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_accessors_of_frozen_parameters_have_no_states(case):
    run_ranks(2, frozen, CASES[case])


OTHER_KEYS = ("coat_m_q", "coat_v_q", "coat_m_a", "coat_m_k", "step", "")


def deepspeeds_own(rank, world, settings):
    """What DeepSpeed's accessors do for every name of a state.

    "embed.weight" lies on one rank only, "up.weight" on both, "up.bias" has fp32 moments.
    """
    from deepspeed import utils

    engine = build(settings)
    named = dict(engine.module.named_parameters())
    stage3 = hasattr(named["scale"], "ds_id")
    for stepped in (False, True):
        for name in ("embed.weight", "up.weight", "up.bias"):
            p = named[name]
            ones = torch.ones(getattr(p, "ds_shape", p.shape))
            for key, which in KINDS.items():
                got, ours = (
                    utils.safe_get_full_optimizer_state(p, key),
                    coat_dist.safe_get_full_moment(p, which),
                )
                assert torch.equal(got, ours) and got.any() == stepped, (name, key)
                if stage3:
                    local = utils.safe_get_local_optimizer_state(p, key)
                    mine = ours.flatten()[rank * local.numel() :][: local.numel()]
                    assert torch.equal(local[: mine.numel()], mine), (name, key)
                    assert not local[mine.numel() :].any(), "padding"
            before = snapshot(engine)
            for key in OTHER_KEYS:
                calls = [
                    partial(utils.safe_get_full_optimizer_state, p, key),
                    partial(utils.safe_set_full_optimizer_state, p, ones, key),
                    partial(utils.safe_get_local_optimizer_state, p, key),
                    partial(utils.safe_set_local_optimizer_state, p, ones, key),
                ]
                for call in calls if stage3 else calls[:2]:
                    with pytest.raises(ValueError) as error:
                        call()
                    accepted = "accepted with CoatAdamW: exp_avg, exp_avg_sq"
                    assert str(error.value) == f"optim_state_key: got {key!r}, {accepted}"
            assert changes(before, snapshot(engine)) == []
            master = utils.safe_get_full_fp32_param(p) + 1
            utils.safe_set_full_fp32_param(p, master)
            assert torch.equal(utils.safe_get_full_fp32_param(p), master), name
        run(engine, rank, 0, 1)


@pytest.mark.parametrize("case", ["zero-1", "zero-2", "zero-1, BF16_Optimizer", "zero-3"])
def test_deepspeeds_accessors_give_moments_and_refuse_other_keys(case):
    run_ranks(2, deepspeeds_own, CASES[case])


def refusals(rank, world):
    engine = build(CASES["zero-2"])
    run(engine, rank, 0, 1)
    p, frozen = engine.module.up.weight, engine.module.frozen.weight
    for words, call in (
        ("which: got 'exp_avg'", lambda: coat_dist.safe_get_full_moment(p, "exp_avg")),
        (
            "param: got a Parameter of shape ",
            lambda: coat_dist.safe_get_full_moment(frozen, "first"),
        ),
        (
            "value: got torch.float32 ",
            lambda: coat_dist.safe_set_full_moment(p, torch.ones(3), "first"),
        ),
        (
            "value: got torch.int32 ",
            lambda: coat_dist.safe_set_full_moment(p, torch.ones(p.shape).int(), "first"),
        ),
        (
            "value: got elements",
            lambda: coat_dist.safe_set_full_moment(p, -torch.ones(p.shape), "second"),
        ),
        (
            "value: got elements",
            lambda: coat_dist.safe_set_full_moment(p, torch.ones(p.shape) / 0, "first"),
        ),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            call()


def test_safe_set_full_moment_names_wrong_arguments():
    run_ranks(1, refusals)


def two_engines(rank, world):
    """What the accessors gave that is not of the latest of several engines on one model."""
    import deepspeed

    from tests.coat_dist.deepspeed.small_engine import CONFIG, PLAIN, model, quiet_deepspeed, train

    quiet_deepspeed()
    wrong, net = [], model()
    first, second = (
        coat_dist.initialize(model=net, config={**CONFIG, "zero_optimization": {"stage": s}})[0]
        for s in (1, 2)
    )
    train(second, rank, 2)
    p = net[0].weight
    got, own = (
        coat_dist.safe_get_full_moment(p, "first"),
        deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg"),
    )
    if not got.any() or not torch.equal(got, own) or first.global_steps:
        wrong.append("not the latest")
    second.destroy()
    del second
    third = coat_dist.initialize(model=net, config=CONFIG)[0]
    if coat_dist.safe_get_full_moment(p, "first").any():
        wrong.append("of an engine of before")
    train(third, rank, 1)
    if not coat_dist.safe_get_full_moment(p, "first").any():
        wrong.append("not of the third")
    coat_dist.initialize(model=net, config=PLAIN, optimizer=torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="that no CoatAdamW under ZeRO trains"):
        coat_dist.safe_get_full_moment(p, "first")
    return wrong


def test_accessors_answer_from_the_latest_engine():
    assert run_ranks(2, two_engines) == [[], []]
