"""Modules and parameters that several layers share, and patching that fails half-way: the model is then as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, patched, unpatch_model
from megatron_patches.patch import swap

from .tiny import BLOCKS, gradients, tiny_batch, tiny_gpt

SETTINGS = ActivationConfig()
A0, M0, A1, M1 = BLOCKS
LAYER = "decoder.layers."


def at(model, path, i):
    return model.get_submodule(f"{LAYER}{i}.{path}")


def share(model, *paths):
    """The first layer's modules become the second's."""
    for path in paths:
        parent, _, key = path.rpartition(".")
        setattr(model.get_submodule(f"{LAYER}1.{parent}".rstrip(".")), key, at(model, path, 0))


def state(model):
    """All that patching might change: classes and attributes of every module."""
    return [(type(m), dict(vars(m))) for m in model.modules()]


def close(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert found[1].keys() == expected[1].keys()
    for name, g in expected[1].items():
        assert F.cosine_similarity(g.flatten().double(), found[1][name].flatten().double(), dim=0) > 0.97, name


@pytest.mark.parametrize(
    ("paths", "left"),
    [
        (["mlp"], {M0: f"mlp shared with {M1}", M1: f"mlp shared with {M0}"}),
        (["self_attention"], {A0: f"self_attention shared with {A1}", A1: f"self_attention shared with {A0}"}),
        (["self_attention.linear_qkv"], dict.fromkeys((A0, A1), "self_attention.linear_qkv shared with")),
        (["self_attention.linear_proj"], dict.fromkeys((A0, A1), "self_attention.linear_proj shared with")),
        (["mlp.linear_fc1", "mlp.linear_fc2"], {}),  # not called, and each MLP knows its norm
        (["pre_mlp_layernorm"], {}),
        (["input_layernorm", "pre_mlp_layernorm"], {}),
        (["mlp", "pre_mlp_layernorm"], {}),
        (["self_attention", "input_layernorm"], {}),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, list) else "",
)
def test_layers_that_share_modules(paths, left, device):
    """Where both want the same patch they get it; where not, both stay as they were."""
    model, batch = tiny_gpt(), tiny_batch(1, device)
    share(model, *paths)
    before, expected = state(model), gradients(model, batch)
    with patched(model, SETTINGS) as report:
        assert report.left.keys() == left.keys()
        assert all(reason.startswith(left[name]) for name, reason in report.left.items())
        assert report.patched == [b for b in BLOCKS if b not in left] and not report.unfused
        close(gradients(model, batch), expected)
    assert state(model) == before
    again = gradients(model, batch)
    assert again[0] == expected[0]
    assert device != "cpu" or all(torch.equal(g, again[1][n]) for n, g in expected[1].items())


def test_a_layer_in_two_places_is_patched_once(device):
    model, batch = tiny_gpt(), tiny_batch(1, device)
    model.decoder.layers[1] = model.decoder.layers[0]
    before, expected = state(model), gradients(model, batch)
    with patched(model, SETTINGS) as report:
        assert report.patched == BLOCKS and not report.left and not report.unfused
        close(gradients(model, batch), expected)
    assert state(model) == before


@pytest.mark.parametrize("module", ["layernorm", "mlp"])
def test_recompute_of_shared_modules_comes_back(module):
    model = tiny_gpt(recompute_granularity="selective", recompute_modules=[module])
    share(model, "mlp", "pre_mlp_layernorm")
    before = state(model)
    with patched(model, SETTINGS):
        assert state(model) != before
    assert state(model) == before


def test_a_module_that_is_used_elsewhere_stays(device):
    """The other place that calls it expects Megatron's module."""
    model, batch = tiny_gpt(), tiny_batch(1, device)
    model.decoder.final_layernorm = at(model, "input_layernorm", 1)
    model.probe = at(model, "mlp", 0)
    expected = gradients(model, batch)
    report = patch_model(model, SETTINGS)
    assert report.left == {
        A1: "input_layernorm shared with decoder.final_layernorm",
        M0: "mlp shared with probe",
    }
    close(gradients(model, batch), expected)


def test_sharing_with_a_layer_that_stays(device):
    model, batch = tiny_gpt(), tiny_batch(1, device)
    share(model, "mlp", "pre_mlp_layernorm", "input_layernorm")
    expected = gradients(model, batch)
    with pytest.raises(ValueError, match="nothing to patch") as error:
        patch_model(model, ActivationConfig(bf16_layers=(0,)))
    assert f"input_layernorm shared with {LAYER}0.input_layernorm" in str(error.value)
    assert gradients(model, batch)[0] == expected[0]


@pytest.mark.parametrize("weights", ["on_use", "cached"])
def test_parameters_that_modules_share(weights, device):
    """One gradient, the sum over all that use it."""
    model, batch = tiny_gpt(), tiny_batch(1, device)
    for path in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv", "pre_mlp_layernorm"):
        at(model, path, 1).weight = at(model, path, 0).weight
    expected = gradients(model, batch)
    with patched(model, ActivationConfig(weights=weights)) as report:
        assert report.patched == BLOCKS
        close(gradients(model, batch), expected)
    assert gradients(model, batch)[0] == expected[0]


@pytest.mark.parametrize("invariant", [False, True])
def test_patching_that_fails_anywhere_changes_nothing(invariant, monkeypatch):
    options = {} if invariant else {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
    model, settings = tiny_gpt(**options), ActivationConfig(tp_invariant=invariant)
    before, set_, count = state(model), swap.Changes.set, 0

    def fail_later(self, *args):
        nonlocal count
        if count == 0:
            raise KeyError("no more")
        count -= 1
        set_(self, *args)

    monkeypatch.setattr(swap.Changes, "set", fail_later)
    failures = 0
    while True:
        count = failures
        try:
            patch_model(model, settings)
            break
        except KeyError:
            failures += 1
            assert state(model) == before, failures
    assert failures > 30
    while True:  # and back
        whole, count = state(model), failures - 35
        try:
            unpatch_model(model)
            break
        except KeyError:
            failures += 1
            assert state(model) == whole
    assert state(model) == before
