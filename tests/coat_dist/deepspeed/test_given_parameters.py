"""``model_parameters`` that a program gives: with names, and as groups with options of their
own.
"""

import pytest
import torch

from tests.coat_dist.deepspeed.small_engine import CONFIG, model, quiet_deepspeed, train
from tests.support import run_ranks


def given_parameters(rank, world):
    """What CoatAdamW's groups hold, or the message, by what is handed over as
    ``model_parameters``.
    """
    deepspeed = quiet_deepspeed()
    import coat_dist  # noqa: F401

    found = {}
    for name, listed in {
        "named": lambda net: net.named_parameters(),
        "foreign": lambda net: [*net.parameters(), torch.nn.Parameter(torch.ones(3))],
        "twice": lambda net: [*net.parameters(), next(net.parameters())],
        "misspelt": lambda net: [{"params": net.parameters(), "wieght_decay": 0.5}],
        "wrong": lambda net: [{"params": net.parameters(), "weight_decay": "0.5"}],
        "own": lambda net: [{"params": net.parameters(), "lr_scale": 0.5, "layer_id": 3}],
    }.items():
        net = model()
        try:
            engine = deepspeed.initialize(model=net, model_parameters=listed(net), config=CONFIG)[0]
            found[name] = [
                (g.get("name"), g["moments"], g.get("layer_id"))
                for g in engine.optimizer.param_groups
            ]
        except ValueError as error:
            found[name] = str(error).partition(",")[0]
    return found


def test_initialize_with_named_parameters_and_groups():
    (found,) = run_ranks(1, given_parameters)
    assert found == {
        "named": [("decay/fp8", "fp8", None), ("no_decay/fp32", "fp32", None)],
        "foreign": "model_parameters: got 1 that are not parameters of the model",
        "twice": [("decay/fp8", "fp8", None), ("no_decay/fp32", "fp32", None)],
        "misspelt": "CoatAdamW wieght_decay: unknown key of a parameter group",
        "wrong": "CoatAdamW weight_decay: got '0.5'",
        "own": [(None, "fp8", 3), (None, "fp32", 3)],
    }


def half_trained(rank, world, stage):
    """Losses where only matrices, or only vectors, of a given group are trained: as given, and
    without what is not.
    """
    deepspeed = quiet_deepspeed()
    for vectors in (False, True):
        found = []
        for chosen in (lambda p: True, lambda p: p.requires_grad):
            net = model()
            for p in net.parameters():
                p.requires_grad_((p.ndim < 2) == vectors)
            config = {**CONFIG, "zero_optimization": {"stage": stage}}
            groups = [{"params": [p for p in net.parameters() if chosen(p)], "lr": 0.05}]
            engine = deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]
            (group,) = engine.optimizer.param_groups
            assert group["moments"] == ("fp32" if vectors else "fp8")
            found.append(train(engine, rank, 3))
        assert found[0] == found[1] and len(set(found[0])) > 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_initialize_with_a_half_frozen_group_trains(stage):
    run_ranks(1, half_trained, stage)
