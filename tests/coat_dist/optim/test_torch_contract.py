"""What torch's own tests ask of AdamW, asked of CoatAdamW: options, groups, hooks, gradients,
odd tensors, errors.
"""

import inspect

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coat_dist.optim import CoatAdamW
from tests.coat_dist.optim.common import assert_same_state

KINDS = ["fp8", "fp32"]
OPTIONS = [
    {},
    {"lr": torch.tensor(1e-2)},
    {"maximize": True},
]


def problem(moments="fp8", named=False, **options):
    """A small net, its optimizer, and a closure as an optimizer of torch takes it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    x, y = torch.randn(8, 12), torch.randn(8, 4)
    params = list(net.named_parameters()) if named else list(net.parameters())
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    optimizer = CoatAdamW([{"params": params, "moments": moments}], **{"lr": 1e-2, **options})

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    return net, optimizer, closure


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loss_falls(options, moments):
    _, optimizer, closure = problem(moments, **options)
    first = float(closure().detach())
    for _ in range(60):
        optimizer.step(closure)
    last = float(closure().detach())
    assert last > 2 * first if options.get("maximize") else last < 0.5 * first


def test_state_dicts_are_in_the_order_of_parameters_whatever_the_order_of_their_first_steps():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(4)]
    optimizer = CoatAdamW(params)
    for i in (2, 0, 3, 1):
        for j, p in enumerate(params):
            p.grad = torch.ones(4) if i == j else None
        optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert [saved["state"][i]["coat_seed"] for i in range(4)] == [1, 3, 0, 2]
    other = CoatAdamW([torch.nn.Parameter(torch.ones(4)) for _ in range(4)])
    other.load_state_dict(saved)
    assert list(other.state_dict()["state"]) == list(saved["state"])


@pytest.mark.parametrize("moments", KINDS)
def test_numbers_changed_in_groups_count_from_the_next_step_on(moments):
    """After steps with other numbers, and as if they had been given from the start."""
    changed = {"betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.2, "maximize": True}
    runs = []
    for late in (True, False):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 200))
        optimizer = CoatAdamW([{"params": [p], "moments": moments}], **({} if late else changed))
        p.grad = torch.zeros(200)  # leaves both moments as they are
        for group in optimizer.param_groups:
            group.update(lr=0.0)
        optimizer.step()
        optimizer.step()
        optimizer.param_groups[0].update(changed)
        for i in range(3):
            p.grad = torch.linspace(1, 2, 200) * (i + 1)
            optimizer.step()
        runs.append((p.detach(), optimizer))
    assert torch.equal(runs[0][0], runs[1][0])
    assert_same_state(runs[0][1], runs[1][1])


def test_parameters_that_take_no_gradient_and_steps_without_any():
    frozen, other = (
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.nn.Parameter(torch.ones(3)),
    )
    optimizer = CoatAdamW([frozen, other])
    optimizer.step()
    assert not optimizer.state and torch.equal(other, torch.ones(3))
    other.grad = torch.ones(3)
    optimizer.step()
    assert set(optimizer.state) == {other} and torch.equal(frozen, torch.ones(3))
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[other]["step"] == 1


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1)], ids=str)
def test_scalars_and_empty_parameters(shape, moments):
    p = torch.nn.Parameter(torch.ones(shape))
    optimizer = CoatAdamW([{"params": [p], "moments": moments}], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.ones(shape)
        optimizer.step()
    assert p.shape == shape and torch.allclose(p, torch.full(shape, 0.7), atol=0.02)
    again = CoatAdamW([{"params": [torch.nn.Parameter(torch.ones(shape))], "moments": moments}])
    again.load_state_dict(optimizer.state_dict())
    assert_same_state(optimizer, again)


@pytest.mark.parametrize("moments", KINDS)
def test_parameters_of_several_types_in_one_group(moments):
    """The state is in the types that its layout says, whatever the parameter's."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    params = [torch.nn.Parameter(torch.ones(256, dtype=t)) for t in types]
    optimizer = CoatAdamW([{"params": params, "moments": moments}], lr=0.125, weight_decay=0.0)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p, t in zip(params, types, strict=True):
        assert p.dtype == t and torch.allclose(p.float(), torch.tensor(0.625), atol=0.02)
    layouts = [
        {k: v.dtype for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        for p in params
    ]
    assert layouts[0] == layouts[1] == layouts[2]


def test_hooks_of_all_kinds_run_in_order_and_can_be_removed():
    _, optimizer, closure = problem()
    seen = []

    def note(what, result=None):
        return lambda *_: (seen.append(what), result)[1]

    handles = [
        optimizer.register_step_pre_hook(note("step pre")),
        optimizer.register_step_post_hook(note("step post")),
        optimizer.register_state_dict_pre_hook(note("save pre")),
        optimizer.register_state_dict_post_hook(note("save post")),
        optimizer.register_load_state_dict_pre_hook(note("load pre")),
        optimizer.register_load_state_dict_post_hook(note("load post")),
        register_optimizer_step_pre_hook(note("all pre")),
        register_optimizer_step_post_hook(note("all post")),
    ]
    expected = [
        "all pre",
        "step pre",
        "step post",
        "all post",
        "save pre",
        "save post",
        "load pre",
        "load post",
    ]
    try:
        optimizer.step(closure)
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    assert seen == expected
    optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == expected


ERRORS = [
    (lambda p: CoatAdamW(p), TypeError, "iterable"),
    (lambda p: CoatAdamW([{"params": {p}}]), TypeError, "ordered"),
    (lambda p: CoatAdamW(["x"]), TypeError, "only optimize Tensors"),
    (
        lambda p: CoatAdamW([{"params": [p]}, {"params": [p]}]),
        ValueError,
        "more than one parameter group",
    ),
    (
        lambda p: CoatAdamW([("a", p), torch.nn.Parameter(torch.ones(1))]),
        ValueError,
        "names are missing",
    ),
    (
        lambda p: CoatAdamW([p], capturable=1),
        ValueError,
        "capturable: got 1, accepted: True or False",
    ),
    (lambda p: CoatAdamW([p]).add_param_group([p]), TypeError, "must be a dict"),
    (
        lambda p: CoatAdamW([p], checkpoint="bf16"),
        ValueError,
        "checkpoint: got 'bf16', accepted: 'codes' or 'fp32'",
    ),
]


@pytest.mark.parametrize("build, error, word", ERRORS, ids=[word for *_, word in ERRORS])
def test_what_is_wrong_is_refused_with_torchs_kind_of_exception(build, error, word):
    with pytest.raises(error, match=word):
        build(torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("moments", KINDS)
def test_gradients_that_are_refused_leave_everything_as_it_was(moments):
    p, q = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = CoatAdamW([{"params": [p, q], "moments": moments}])
    for warm in (False, True):
        p.grad, q.grad = torch.ones(4, 4), torch.ones(4, 4).to_sparse()
        before = p.detach().clone()
        with pytest.raises(TypeError, match="sparse"):
            optimizer.step()
        assert torch.equal(p, before) and (warm or not optimizer.state)
        q.grad = torch.ones(4, 4)
        optimizer.step()


def test_every_option_of_torchs_adamw_is_an_option_or_refused_by_name():
    mine = inspect.signature(CoatAdamW).parameters
    for name, theirs in inspect.signature(torch.optim.AdamW).parameters.items():
        if name in ("amsgrad", "foreach", "fused", "differentiable"):
            with pytest.raises(TypeError, match=name):
                CoatAdamW([torch.nn.Parameter(torch.ones(1))], **{name: True})
        else:
            assert name in mine and mine[name].default == theirs.default, name


def test_names_travel_in_state_dicts():
    _, optimizer, closure = problem(named=True)
    optimizer.step(closure)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    _, other, _ = problem(named=True)
    other.load_state_dict(saved)
    assert_same_state(optimizer, other)
    _, plain, _ = problem()
    plain.load_state_dict(saved)
