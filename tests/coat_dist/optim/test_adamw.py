"""CoatAdamW as a torch optimizer."""

import math

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_moments
from coat_dist.optim.state import moment

from .common import make, train

CODE_KEYS = {"coat_m_q", "coat_m_a", "coat_m_k", "coat_v_q", "coat_v_a", "coat_v_k", "step"}


def test_state_layout_is_lazy_private_and_two_dimensional():
    p, optimizer = make(300)
    assert not optimizer.state
    optimizer.state[p] = {}  # DeepSpeed does this
    train(optimizer, [p], 2)
    state = optimizer.state[p]
    assert set(state) == CODE_KEYS | {"coat_seed"}
    assert state["step"] == 2 and type(state["step"]) is int
    for which in ("first", "second"):
        q, a, k = moment(state, which)
        assert (q.dtype, q.shape) == (torch.uint8, (3, 128))
        assert (a.dtype, a.shape, k.dtype, k.shape) == (torch.bfloat16, (3,), torch.uint8, (3,))
    assert sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor)) == 2 * 3 * (128 + 3)


def test_groups_added_later_take_defaults_and_own_options():
    p, optimizer = make()
    q = torch.nn.Parameter(torch.randn(200))
    optimizer.add_param_group({"params": q, "moments": "fp32", "lr": 0.5})
    train(optimizer, [p, q], 1)
    assert set(optimizer.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[q]["exp_avg"].dtype == torch.float32
    assert optimizer.param_groups[1]["group_size"] == 128
    with pytest.raises(ValueError, match="group_size"):
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.randn(3))], "group_size": 100}
        )
    assert len(optimizer.param_groups) == 2
    named = CoatAdamW([("weight", torch.nn.Parameter(torch.randn(3)))])
    assert named.param_groups[0]["param_names"] == ["weight"]
    generator = CoatAdamW(x for x in [torch.nn.Parameter(torch.randn(3))])
    assert len(generator.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "options, word",
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"expand": 1}, "expand"),
        ({"first_moment": "fp8"}, "first_moment"),
        ({"second_moment": None}, "second_moment"),
        ({"first_moment": "log8"}, "first_moment"),
        ({"second_moment": "int8"}, "second_moment"),
        ({"second_moment": "log8", "expand": False}, "expand"),
        ({"group_size": 100}, "group_size"),
        ({"maximize": "no"}, "maximize"),
        ({"stochastic_rounding": 0}, "stochastic_rounding"),
        ({"stochastic_rounding": "always"}, "stochastic_rounding"),
    ],
)
def test_bad_options_are_named(options, word):
    with pytest.raises(ValueError, match=f"CoatAdamW {word}: got"):
        make(**options)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        *(
            ("moment", "moments"),
            ("wieght_decay", "weight_decay"),
            ("weight-decay", "weight_decay"),
            ("LR", "lr"),
        ),
        *(("first_momnt", "first_moment"), ("beta", "betas"), ("group_sizes", "group_size")),
    ],
)
def test_keys_of_groups_that_are_nearly_options_are_refused(key, meant):
    optimizer = CoatAdamW([torch.nn.Parameter(torch.ones(3))])
    late = {"params": [torch.nn.Parameter(torch.ones(3))], key: 0.5}
    for add in (lambda: CoatAdamW([late]), lambda: optimizer.add_param_group(late)):
        with pytest.raises(
            ValueError,
            match=f"CoatAdamW {key}: unknown key of a parameter group, accepted: '{meant}'",
        ):
            add()
    saved = optimizer.state_dict()  # of an earlier release, which took it
    saved["param_groups"][0] |= {key: 0.5, "fused": True}
    optimizer.load_state_dict(saved)


def test_keys_of_the_programs_own_stay():
    own = {
        "name": "x",
        "lr_scale": 0.5,
        "layer_id": 3,
        "lr_mult": 1.0,
        "wd_mult": 1.0,
        "weight_decay_mult": 2.0,
        "no_weight_decay": True,
        "my_weight_decay": 1.0,
    }
    own |= {
        "initial_lr": 0.1,
        "base_momentum": 0.8,
        "max_lr": 1.0,
        "min_lr": 0.0,
        "is_expert_parallel": False,
    }
    group = {"params": [torch.nn.Parameter(torch.ones(3))], "fused": None, "foreach": False, **own}
    assert CoatAdamW([group]).param_groups[0].items() >= own.items()


def test_complex_and_wide_tensors_are_refused():
    for bad in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(TypeError, match="accepted: dense"):
            CoatAdamW([torch.nn.Parameter(bad)])


def test_no_second_moment_beside_a_huge_one_becomes_zero():
    """Without expansion, which by itself leaves none at zero."""
    p, optimizer = make(128, expand=False)
    p.grad = torch.full((128,), 1e-12)
    p.grad[0] = 1e6
    optimizer.step()
    _, v = export_moments(p, optimizer.state[p], optimizer.param_groups[0])
    assert (v > 0).all()
