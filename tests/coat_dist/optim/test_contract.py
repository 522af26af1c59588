"""What holds of every step, whatever computes it: here the definition; the kernels in
tests/coat_dist/ops.
"""

import copy

import pytest
import torch

pytest.importorskip("triton")

from coat_dist.optim import CoatAdamW, import_moments
from tests.coat_dist.ops import adamw_layouts
from tests.coat_dist.optim.common import assert_same_state


@pytest.mark.parametrize("variant", adamw_layouts.VARIANTS)
def test_every_layout_gives_the_bits_of_contiguous_tensors(variant):
    adamw_layouts.check(**adamw_layouts.VARIANTS[variant])


@pytest.mark.parametrize("moments", ["fp8", "fp32"])
def test_autograd_sees_a_step(moments):
    adamw_layouts.check_versions(moments)


def test_what_does_not_fit_is_refused_before_anything_changes():
    adamw_layouts.check_sizes()


def build(n=3, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(256)) for _ in range(n)]
    return params, CoatAdamW(params, **{"lr": 0.1, "betas": (0.9, 0.999), **options})


def step(params, optimizer, seed=1):
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)
    optimizer.step()


def seeds(params, optimizer):
    return [optimizer.state[p]["coat_seed"] for p in params]


@pytest.mark.parametrize("imported", [[0], [1], [0, 2], [2, 1]])
def test_seeds_stay_distinct_after_import_moments(imported):
    params, optimizer = build()
    step(params, optimizer)
    for i in imported:
        zeros = torch.zeros(256)
        optimizer.state[params[i]] = import_moments(
            params[i], optimizer.param_groups[0], zeros, zeros, 1
        )
    late = [torch.nn.Parameter(torch.randn(256)) for _ in range(2)]
    optimizer.add_param_group({"params": late})
    saved = copy.deepcopy(optimizer.state_dict())
    others, resumed = build()
    others += [torch.nn.Parameter(p.detach().clone()) for p in late]
    resumed.add_param_group({"params": others[3:]})
    resumed.load_state_dict(saved)
    params += late
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    for ps, o in ((params, optimizer), (others, resumed)):
        for i in range(2):
            step(ps, o, seed=5 + i)
        assert seeds(ps, o) == list(range(5))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert_same_state(optimizer, resumed)


def test_seeds_stay_distinct_after_states_of_some_parameters_were_loaded():
    params, optimizer = build()
    step(params[1:], optimizer)
    del optimizer.state[params[1]]
    saved = optimizer.state_dict()
    others, resumed = build()
    resumed.load_state_dict(saved)
    assert seeds(others[2:], resumed) == [1]
    step(others[1:], resumed)
    step(others, resumed)
    assert seeds(others, resumed) == [2, 0, 1]


def test_what_codes_mean_must_be_in_a_state_dict_that_has_codes():
    params, optimizer = build()
    fresh = optimizer.state_dict()
    step(params, optimizer)
    for key in ("first_moment", "second_moment", "expand"):
        for saved, refused in ((optimizer.state_dict(), True), (copy.deepcopy(fresh), False)):
            del saved["param_groups"][0][key]
            others, loaded = build()
            if refused:
                with pytest.raises(ValueError, match=f"group 0, {key}: got none, accepted: "):
                    loaded.load_state_dict(saved)
                assert not loaded.state
            else:
                loaded.load_state_dict(saved)
                step(others, loaded)


def test_a_saved_option_that_is_wrong_is_refused():
    params, optimizer = build()
    step(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(maximize="no")
    _, loaded = build()
    word = "CoatAdamW.load_state_dict: group 0: CoatAdamW maximize: got 'no', accepted"
    with pytest.raises(ValueError, match=word):
        loaded.load_state_dict(saved)
    assert not loaded.state and loaded.param_groups[0]["lr"] == 0.1


def test_codes_of_another_memory_order_are_loaded_as_rows():
    params, optimizer = build()
    step(params, optimizer)
    saved = optimizer.state_dict()
    turned = {k: v.t().contiguous().t() for k, v in saved["state"][0].items() if k.endswith("_q")}
    saved["state"][0] = {**saved["state"][0], **turned}
    _, loaded = build()
    loaded.load_state_dict(saved)
    assert_same_state(optimizer, loaded)
    assert all(
        t.is_contiguous()
        for s in loaded.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )


def test_a_state_left_on_meta_is_refused_before_anything_changes():
    params, optimizer = build()
    step(params, optimizer)
    states = optimizer.state[params[1]]
    optimizer.state[params[1]] = {
        k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in states.items()
    }
    with pytest.raises(
        ValueError, match="parameter 1, of shape .*: state, coat_m_q: got .* on meta, accepted: "
    ):
        step(params, optimizer)
    assert [optimizer.state[p]["step"] for p in params] == [1, 1, 1]
