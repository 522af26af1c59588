"""Which parameters decay and which keep fp32 moments."""

import pytest
import torch

from coat_dist.optim import CoatAdamW, param_groups


def model():
    return torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(10, 4),
            "norm": torch.nn.LayerNorm(4),
            "fc": torch.nn.Linear(4, 8),
            "conv": torch.nn.Conv1d(4, 4, 3),
            "out": torch.nn.Linear(8, 10, bias=False),
        }
    )


def names(net, groups):
    of = {id(p): n for n, p in net.named_parameters()}
    return {g["name"]: [of[id(p)] for p in g["params"]] for g in groups}


def test_matrices_get_fp8_and_vectors_fp32():
    net = model()
    groups = param_groups(net, 0.1, lr=0.5)
    assert names(net, groups) == {
        "decay/fp8": ["embed.weight", "fc.weight", "conv.weight", "out.weight"],
        "no_decay/fp32": ["norm.weight", "norm.bias", "fc.bias", "conv.bias"],
    }
    assert [(g["moments"], g["weight_decay"], g["lr"]) for g in groups] == [
        ("fp8", 0.1, 0.5),
        ("fp32", 0.0, 0.5),
    ]
    assert names(net, param_groups(list(net.named_parameters()), 0.1)) == names(net, groups)
    CoatAdamW(groups)


def test_megatron_matrices_that_are_not_sharded_keep_fp32_moments():
    net = model()
    for name in ("fc", "out"):
        net[name].weight.tensor_model_parallel = True
    net["fc"].bias.tensor_model_parallel = True
    net["embed"].weight.tensor_model_parallel = False
    assert names(net, param_groups(net, 0.1)) == {
        "decay/fp8": ["fc.weight", "out.weight"],
        "decay/fp32": ["embed.weight", "conv.weight"],
        "no_decay/fp32": ["norm.weight", "norm.bias", "fc.bias", "conv.bias"],
    }


def test_zero3_parameters_are_judged_by_their_full_shape():
    matrix, vector = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(0))
    matrix.ds_shape, vector.ds_shape = torch.Size([8, 8]), torch.Size([8])
    groups = param_groups([("a", matrix), ("b", vector)], 0.1)
    assert [g["name"] for g in groups] == ["decay/fp8", "no_decay/fp32"]


def test_frozen_parameters_are_left_out_and_tied_ones_counted_once():
    net = model()
    net["fc"].requires_grad_(False)
    net["tied"] = net["embed"]
    left = names(net, param_groups(net, 0.1))
    assert (
        sum(left.values(), []).count("embed.weight") == 1 and "fc.weight" not in left["decay/fp8"]
    )


def test_parameters_without_names_are_refused():
    with pytest.raises(
        ValueError, match=r"got a Parameter, accepted: a module, or its named_parameters\(\)"
    ):
        param_groups(model().parameters(), 0.1)
