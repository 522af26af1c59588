"""A step that takes over what the last one checked is the step it would have been; and steps
counted on the device.
"""

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from coat_dist.optim import CoatAdamW, plan
from tests.coat_dist.optim.common import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def build(**options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in ((16, 16), (128,), (129,), (48,), (7,))]
    groups = [{"params": params[:3]}, {"params": params[3:], "moments": "fp32"}]
    return params, CoatAdamW(groups, **{"lr": 0.1, **options})


def train(params, optimizer, first, last, without=lambda i, j: False):
    for i in range(first, last):
        for j, p in enumerate(params):
            g = torch.Generator().manual_seed(100 * i + j)
            p.grad = None if without(i, j) else torch.randn(p.shape, generator=g)
        optimizer.step()


def no_plans(monkeypatch):
    monkeypatch.setattr(plan.Plans, "learn", lambda *_: None)


def changes():

    def forget(params, optimizer):
        del optimizer.state[params[1]]

    def add(params, optimizer):
        params.append(torch.nn.Parameter(torch.ones(64)))
        optimizer.add_param_group({"params": params[-1:]})

    def remove(params, optimizer):
        params.pop(1)
        optimizer.param_groups[0]["params"].pop(1)

    def count(params, optimizer):
        optimizer.state[params[2]]["step"] = 7

    def other_seed(params, optimizer):
        optimizer.state[params[0]]["coat_seed"] = 77

    def factor(params, optimizer):
        optimizer.grad_factor = torch.tensor(0.5)

    def copies(params, optimizer):
        optimizer.copies = {params[0]: torch.zeros(256, dtype=torch.bfloat16)}

    def turn(params, optimizer):
        params[0].data = params[0].data.t()

    return [v for v in locals().values()]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_what_changes_between_steps_is_seen(monkeypatch, change):
    runs = []
    for plans in (True, False):
        if not plans:
            no_plans(monkeypatch)
        params, optimizer = build()
        train(params, optimizer, 0, 3)
        change(params, optimizer)
        train(params, optimizer, 3, 6)
        runs.append((params, optimizer))
    assert all(torch.equal(p, q) for p, q in zip(runs[0][0], runs[1][0], strict=True))
    assert_same_state(runs[0][1], runs[1][1])
    pairs = zip(runs[0][1].copies.values(), runs[1][1].copies.values(), strict=True)
    assert all(torch.equal(a, b) and a.any() for a, b in pairs)


def in_its_memory(tensor, dtype):
    """As many elements of another type at the same address, as after memory was freed and used
    again.
    """
    return tensor.view(-1).view(dtype)[: tensor.numel()].view(tensor.shape)


def misfits():
    def a_narrower_state(params, optimizer):
        state = optimizer.state[params[3]]
        state["exp_avg"] = in_its_memory(state["exp_avg"], torch.bfloat16)

    def narrower_amaxes(params, optimizer):
        state = optimizer.state[params[0]]
        state["coat_v_a"] = in_its_memory(state["coat_v_a"], torch.uint8)

    def another_shape(params, optimizer):
        params[0].data = params[0].data.view(-1)

    def a_copy_of_integers(params, optimizer):
        optimizer.copies = {
            p: in_its_memory(copy, torch.int16) for p, copy in optimizer.copies.items()
        }

    def a_wide_copy(params, optimizer):
        optimizer.copies = {p: torch.zeros(p.shape) for p in params}

    return [v for v in locals().values()]


@pytest.mark.parametrize("change", misfits(), ids=lambda change: change.__name__)
def test_what_does_not_fit_any_more_is_refused_though_it_lies_where_it_lay(change):
    params, optimizer = build()
    optimizer.copies = {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in params}
    train(params, optimizer, 0, 3)
    change(params, optimizer)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="CoatAdamW.step: group [01], parameter 0"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_other_gradients_in_each_step_make_no_endless_plans(monkeypatch):
    monkeypatch.setattr(plan.Plans, "LIMIT", 5)
    params = [torch.nn.Parameter(torch.ones(16)) for _ in range(3)]
    optimizer = CoatAdamW(params)
    train(params, optimizer, 0, 16, lambda i, j: not (i + 1) >> j & 1)
    sizes = [key[-1] for key in optimizer._plans._plans]
    assert sum(sizes) == optimizer._plans._held <= 5


def test_thousands_of_groups_find_their_plans(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(1500)]
    optimizer = CoatAdamW([{"params": [p], "moments": "fp32"} for p in params])
    train(params, optimizer, 0, 1)
    monkeypatch.setattr(plan.Plans, "learn", lambda *_: pytest.fail("a group has no plan"))
    train(params, optimizer, 1, 2)


def test_a_plan_keeps_no_state_in_memory():
    params, optimizer = build()
    train(params, optimizer, 0, 3)
    held = weakref.ref(optimizer.state[params[0]]["coat_m_q"])
    optimizer.state[params[0]] = {}
    gc.collect()
    assert held() is None


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs the interpreter; on GPUs: tests/gpu/test_capturable.py"
)
@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.9, 0.95)}, {"lr": torch.tensor(0.1)}], ids=str
)
def test_steps_counted_in_tensors_have_the_bits_of_steps_counted_in_numbers(monkeypatch, options):
    """With kernels, which here are interpreted."""
    monkeypatch.setenv("COAT_KERNELS", "1")
    runs = []
    for capturable in (True, False):
        params, optimizer = build(capturable=capturable, **options)
        train(params, optimizer, 0, 4)
        if capturable:
            saved = optimizer.state_dict()
            assert saved["param_groups"][0]["capturable"] is True
            others, other = build(capturable=False, **options)
            other.load_state_dict(saved)
            assert other.param_groups[0]["capturable"] is True
            with torch.no_grad():
                for p, q in zip(params, others, strict=True):
                    q.copy_(p)
            params, optimizer = others, other
        train(params, optimizer, 4, 5)
        runs.append((params, optimizer))
    for p, q in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(p, q)
        a, b = runs[0][1].state[p], runs[1][1].state[q]
        assert (
            a["step"].dtype == torch.float32
            and a["step"].shape == ()
            and int(a["step"]) == b["step"] == 5
        )
        assert all(
            torch.equal(v, b[k])
            for k, v in a.items()
            if isinstance(v, torch.Tensor) and k != "step"
        )


def test_the_option_may_be_switched_between_steps(monkeypatch):
    monkeypatch.setenv("COAT_KERNELS", "1")
    p = torch.nn.Parameter(torch.ones(16))
    optimizer = CoatAdamW([{"params": [p], "moments": "fp32"}])
    for capturable in (False, True, True, False):
        optimizer.param_groups[0]["capturable"] = capturable
        p.grad = torch.ones(16)
        optimizer.step()
        assert isinstance(optimizer.state[p]["step"], torch.Tensor) == capturable
    assert optimizer.state[p]["step"] == 4


def test_without_kernels_it_is_refused_before_anything_changes():
    params, optimizer = build()
    train(params, optimizer, 0, 1)
    for group in optimizer.param_groups:
        group["capturable"] = True
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        ValueError,
        match="group 0, parameter 0, .*capturable: got True for a parameter on cpu, accepted",
    ):
        train(params, optimizer, 1, 2)
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
