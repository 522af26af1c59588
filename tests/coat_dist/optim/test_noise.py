"""Noise of stochastic rounding belongs to the parameter: its name, not its company."""

import copy

import pytest
import torch

from coat_dist.optim import CoatAdamW, name_parameters, param_groups
from coat_dist.optim.seeds import new_seed

NAMES = ("embed.weight", "blocks.0.weight", "blocks.1.weight", "out.weight")


def params_of(names):
    """Equal parameters and gradients: what differs between them is noise."""
    found = {}
    for name in names:
        g = torch.Generator().manual_seed(0)
        found[name] = torch.nn.Parameter(torch.randn(512, generator=g))
    return found


def train(optimizer, params, steps=3):
    for i in range(steps):
        for p in params.values():
            p.grad = torch.randn(512, generator=torch.Generator().manual_seed(i))
        optimizer.step()


@pytest.fixture
def together():
    params = params_of(NAMES)
    optimizer = CoatAdamW(list(params.items()))
    train(optimizer, params)
    return params, optimizer


def test_the_time_of_adding_a_parameter_does_not_matter(together):
    params, optimizer = together
    late = params_of(NAMES)
    first = dict(list(late.items())[:2])
    grown = CoatAdamW(list(first.items()))
    train(grown, first, 1)
    grown.add_param_group({"params": list(late.items())[2:]})
    train(grown, late, 1)
    assert [grown.state[p]["coat_seed"] for p in late.values()] == [
        optimizer.state[p]["coat_seed"] for p in params.values()
    ]


def test_no_two_parameters_draw_the_same(together):
    params, optimizer = together
    codes = [optimizer.state[p]["coat_v_q"] for p in params.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(codes) for b in codes[:i])
    names = [
        f"model.layers.{i}.{part}.weight"
        for i in range(1000)
        for part in ("qkv", "out", "fc1", "fc2")
    ]
    taken = set()
    assert len({new_seed(name, taken) for name in names}) == len(names) == len(taken)


def test_names_that_collide_draw_different_noise():
    assert new_seed("plumless", taken := set()) == 1306201125  # zlib.crc32, as of the next
    assert new_seed("buckeroo", taken) != 1306201125
    assert len(taken) == 2


def test_wrappers_change_no_noise():
    plain = new_seed("blocks.0.weight", set())
    for name in (
        "module.blocks.0.weight",
        "_orig_mod.module.blocks.0.weight",
        "_forward_module._orig_mod.blocks.0.weight",
        "blocks._orig_mod.0.weight",
    ):
        assert new_seed(name, set()) == plain
    assert new_seed("blocks.module.0.weight", set()) != plain


def test_parameter_groups_know_their_names():
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(16, 16), "b": torch.nn.Linear(16, 16)})
    alone = torch.nn.ModuleDict({"b": copy.deepcopy(net["b"])})
    seeds = []
    for model in (net, alone):
        groups = param_groups(model, 0.1)
        assert [n for g in groups for n in g["names"]] == [
            n
            for kind in ("weight", "bias")
            for n, _ in model.named_parameters()
            if n.endswith(kind)
        ]
        optimizer = CoatAdamW(groups)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        seeds.append(optimizer.state[model["b"].weight]["coat_seed"])
    assert seeds[0] == seeds[1]


def test_names_can_be_given_to_an_optimizer_of_bare_parameters():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer, named = CoatAdamW(list(net.parameters())[::-1]), CoatAdamW(net.named_parameters())
    name_parameters(optimizer, net)
    assert optimizer.param_groups[0]["param_names"] == named.param_groups[0]["param_names"][::-1]
    net(torch.ones(2, 8)).sum().backward()
    for one in (optimizer, named):
        one.step()
    assert all(
        optimizer.state[p]["coat_seed"] == named.state[p]["coat_seed"] for p in net.parameters()
    )
    with pytest.raises(
        ValueError, match=r"name_parameters model: got one without parameter 0 of group 0.*accepted"
    ):
        name_parameters(optimizer, net[0])
