"""States of CoatAdamW saved, copied and loaded; checkpoints that do not fit are refused."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from coat_dist.optim import CoatAdamW, export_moments, fp32_state_dict, import_moments, param_groups

from .common import assert_same_state, equal_bytes, make, train


def test_loading_copies_and_keeps_dtypes_for_low_precision_parameters():
    p, optimizer = make(dtype=torch.bfloat16)
    train(optimizer, [p], 2)
    q, other = make(dtype=torch.bfloat16)
    other.load_state_dict(optimizer.state_dict())
    assert_same_state(optimizer, other)
    before = copy.deepcopy(optimizer.state_dict())
    train(other, [q], 1)
    for key, value in optimizer.state[p].items():
        assert (
            torch.equal(value, before["state"][0][key]) if isinstance(value, torch.Tensor) else True
        )


@pytest.mark.parametrize(
    "change, word",
    [
        ({"group_size": 64}, "group_size"),
        ({"first_moment": "e5m2"}, "first_moment"),
        ({"expand": False}, "expand"),
        ({"normalize": False}, "normalize"),
        ({"second_moment": "e5m2"}, "second_moment"),
        ({"n": 700}, "coat_m_q"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(change, word):
    p, optimizer = make()
    train(optimizer, [p], 1)
    q, other = make(**{"n": 300, **change})
    train(other, [q], 2, seed=3)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=word):
        other.load_state_dict(optimizer.state_dict())
    after = other.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, value in before["state"][0].items():
        now = after["state"][0][key]
        assert torch.equal(value, now) if isinstance(value, torch.Tensor) else value == now


def test_foreign_and_damaged_checkpoints_say_what_to_do():
    p, optimizer = make()
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.randn(300))])
    train(theirs, theirs.param_groups[0]["params"], 1)
    with pytest.raises(ValueError, match="another optimizer.*import_moments"):
        optimizer.load_state_dict(theirs.state_dict())
    train(optimizer, [p], 1)
    saved = optimizer.state_dict()
    fp32 = {"step": 3, "exp_avg": torch.zeros(300), "exp_avg_sq": torch.zeros(300)}
    for damage, word in (
        (
            {
                "state": {
                    0: {**saved["state"][0], "coat_m_q": saved["state"][0]["coat_m_q"].float()}
                }
            },
            "float32",
        ),
        ({"state": {0: fp32}}, "exp_avg.*import_moments"),
        ({"state": {0: {**saved["state"][0], "step": torch.tensor(1.0)}}}, "step"),
        ({"param_groups": saved["param_groups"] * 2}, "parameter groups"),
    ):
        with pytest.raises(ValueError, match=word):
            optimizer.load_state_dict({**saved, **damage})
    optimizer.state[p] = fp32
    with pytest.raises(ValueError, match="import_moments"):
        optimizer.step()


def test_states_of_adam_come_without_its_own_weight_decay():
    """Adam adds it to the gradient; going on with decoupled decay would be another training."""
    p, optimizer = make()
    for decay in (0.1, 0.0):
        theirs = torch.optim.Adam([torch.nn.Parameter(torch.randn(300))], weight_decay=decay)
        train(theirs, theirs.param_groups[0]["params"], 1)
        with fp32_state_dict(optimizer):
            if decay:
                with pytest.raises(
                    ValueError, match="decoupled_weight_decay: got False with weight_decay 0.1"
                ):
                    optimizer.load_state_dict(theirs.state_dict())
                assert not optimizer.state
            else:
                optimizer.load_state_dict(theirs.state_dict())
                assert optimizer.state[p]["step"] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "normalize", [(False, True), (True, False)], ids=["to normalized", "from normalized"]
)
def test_distributed_checkpoints_in_fp32_load_whether_first_moments_are_normalized_or_not(
    tmp_path, lr, normalize
):
    """A distributed load asks for every key."""
    runs = []
    for option in normalize:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        optimizer = CoatAdamW(param_groups(model, 0.1), lr=lr, normalize=option)
        for i in range(3):
            optimizer.zero_grad()
            model(torch.arange(32.0).view(2, 16).roll(i)).square().sum().backward()
            optimizer.step()
        runs.append((model, optimizer))
    (model, optimizer), (others, other) = runs
    with fp32_state_dict(optimizer):
        saved = get_optimizer_state_dict(model, optimizer)
    dcp.save(saved, checkpoint_id=tmp_path)
    with fp32_state_dict(other):
        found = get_optimizer_state_dict(others, other)
        dcp.load(found, checkpoint_id=tmp_path)
        set_optimizer_state_dict(others, other, found)
    for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert (mine["normalize"], theirs["normalize"]) == normalize[::-1]
        for p, q in zip(mine["params"], theirs["params"], strict=True):
            state = import_moments(p, mine, *export_moments(q, optimizer.state[q], theirs), step=3)
            assert all(torch.equal(x, other.state[p][k]) for k, x in state.items() if k != "step")
            assert other.state[p]["step"] == 3


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("always", [False, True], ids=["inside with", "always"])
def test_fp32_state_dicts_load_as_torch_names_them(always, flatten):
    """Torch takes the names of a flattened state dict from ``optimizer.state``."""
    mode = contextlib.nullcontext if always else fp32_state_dict
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def build():
        model = torch.nn.Sequential(torch.nn.Linear(100, 48), torch.nn.LayerNorm(48)).bfloat16()
        more = {"checkpoint": "fp32"} if always else {}
        return model, CoatAdamW(param_groups(model, 0.1), master_weights="bf16_remainder", **more)

    (model, optimizer), (other_model, other) = build(), build()
    for i in range(3):
        model(torch.randn(4, 100).bfloat16()).mul(i + 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other_model.load_state_dict(model.state_dict())
    with mode(optimizer), mode(other):
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(other_model, other, copy.deepcopy(saved), options=options)
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        group = next(g for g in optimizer.param_groups if any(p is x for x in g["params"]))
        old, new = optimizer.coded_state[p], other.coded_state[q]
        assert old.keys() == new.keys() and old["step"] == new["step"] == 3
        assert equal_bytes(old["coat_p_low"], new["coat_p_low"])
        if group["moments"] == "fp8":
            wanted = import_moments(q, group, *export_moments(p, old, group), step=3)
            assert all(
                equal_bytes(wanted[k], new[k]) for k in wanted if k[:6] in ("coat_m", "coat_v")
            )


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_the_fp32_option_shows_and_saves_fp32_states_and_travels_with_copies(copied):
    p, optimizer = make(checkpoint="fp32")
    train(optimizer, [p], 2)
    group = optimizer.param_groups[0]
    for one in (optimizer, copied(optimizer)):
        (shown,), (saved,) = one.state.values(), one.state_dict()["state"].values()
        (codes,) = one.coded_state.values()
        assert shown.keys() == saved.keys() == {"step", "coat_seed", "exp_avg", "exp_avg_sq"}
        for key, wanted in zip(
            ("exp_avg", "exp_avg_sq"), export_moments(p, codes, group), strict=True
        ):
            assert equal_bytes(shown[key], wanted) and equal_bytes(saved[key], wanted)
    theirs = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone())])
    state = optimizer.state_dict()["state"][0]
    theirs.load_state_dict(
        {**theirs.state_dict(), "state": {0: {**state, "step": torch.tensor(2.0)}}}
    )
    wanted = import_moments(p, group, state["exp_avg"], state["exp_avg_sq"], step=2) | {
        "coat_seed": state["coat_seed"]
    }
    optimizer.state[p] = state
    assert optimizer.coded_state[p].keys() == wanted.keys()
    assert all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(wanted[k]))
        for k, x in optimizer.coded_state[p].items()
    )
    optimizer.state.clear()
    assert p not in optimizer.state
    assert not optimizer.coded_state and len(optimizer.state) == 0
