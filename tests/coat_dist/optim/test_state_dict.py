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

from coat_dist.optim import (
    CoatAdamW,
    export_master,
    export_moments,
    fp32_state_dict,
    import_moments,
    param_groups,
)
from tests.support import equal

from .common import equal_bytes, make, train


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
    assert equal(other.state_dict(), before)


def test_foreign_and_damaged_checkpoints_say_what_to_do():
    p, optimizer = make()
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.randn(300))])
    train(theirs, theirs.param_groups[0]["params"], 1)
    with pytest.raises(ValueError, match="another optimizer.*import_moments"):
        optimizer.load_state_dict(theirs.state_dict())
    amsgrad = torch.optim.AdamW([torch.nn.Parameter(torch.randn(300))], amsgrad=True)
    train(amsgrad, amsgrad.param_groups[0]["params"], 1)
    with fp32_state_dict(optimizer), pytest.raises(ValueError, match="max_exp_avg_sq"):
        optimizer.load_state_dict(amsgrad.state_dict())
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
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("always", [False, True], ids=["inside with", "always"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "normalize", [(False, True), (True, False)], ids=["to normalized", "from normalized"]
)
def test_fp32_state_dict_through_a_distributed_checkpoint(tmp_path, normalize, lr, always, flatten):
    """A distributed load asks for every key, whether first moments are normalized or not; torch
    takes the names of a flattened state dict from ``optimizer.state``. Groups may be others.
    """
    mode = contextlib.nullcontext if always else fp32_state_dict
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    checkpoint = "fp32" if always else "codes"

    def build(normalize, **more):
        model = torch.nn.Sequential(torch.nn.Linear(100, 48), torch.nn.LayerNorm(48)).bfloat16()
        return model, CoatAdamW(
            param_groups(model, 0.1),
            lr=lr,
            master_weights="bf16_remainder",
            checkpoint=checkpoint,
            normalize=normalize,
            **more,
        )

    model, optimizer = build(normalize[0])
    other_model, other = build(normalize[1], group_size=64, second_moment="e5m2")
    for i in range(3):
        model(torch.randn(4, 100).bfloat16()).mul(i + 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other_model.load_state_dict(model.state_dict())
    with mode(optimizer), mode(other):
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.save(saved, checkpoint_id=tmp_path)
        found = get_optimizer_state_dict(other_model, other, options=options)
        dcp.load(found, checkpoint_id=tmp_path)
        set_optimizer_state_dict(other_model, other, found, options=options)
    for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert (theirs["normalize"], mine["normalize"]) == normalize
        for q, p in zip(mine["params"], theirs["params"], strict=True):
            old, new = optimizer.coded_state[p], other.coded_state[q]
            assert old.keys() == new.keys() and old["step"] == new["step"] == 3
            moments = export_moments(p, old, theirs)
            wanted = import_moments(q, mine, *moments, 3, export_master(p, old))
            assert all(equal_bytes(x, new[k]) for k, x in wanted.items() if k != "step")


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
    assert equal(optimizer.coded_state[p], wanted)
    optimizer.state.clear()
    assert p not in optimizer.state
    assert not optimizer.coded_state and len(optimizer.state) == 0
