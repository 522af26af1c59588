"""Modules and parameters that several layers share, and patching that fails half-way: the model
is then as it was.
"""

from __future__ import annotations

import pytest

from coat_dist.config import ActivationConfig
from coat_dist.patching import changes
from megatron_patches import patch_model, patched, unpatch_model

from .tiny import (
    BLOCKS,
    assert_close,
    assert_equal,
    gradients,
    selective,
    state,
    tiny_batch,
    tiny_gpt,
)

SETTINGS = ActivationConfig()
A0, M0, A1, M1 = BLOCKS
LAYER = "decoder.layers."


def share(model, *paths):
    """The first layer's modules become the second's."""
    for path in paths:
        parent, _, key = path.rpartition(".")
        target = model.get_submodule(f"{LAYER}1.{parent}".rstrip("."))
        setattr(target, key, model.get_submodule(f"{LAYER}0.{path}"))


def share_weights(model):
    for path in (
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "self_attention.linear_qkv",
        "pre_mlp_layernorm",
    ):
        model.get_submodule(f"{LAYER}1.{path}").weight = model.get_submodule(
            f"{LAYER}0.{path}"
        ).weight


def share_layer(model):
    model.decoder.layers[1] = model.decoder.layers[0]


def share_elsewhere(model):
    model.decoder.final_layernorm = model.decoder.layers[1].input_layernorm
    model.probe = model.decoder.layers[0].mlp


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda model: share(model, "mlp"), {M0, M1}),
        (lambda model: share(model, "self_attention.linear_qkv"), {A0, A1}),
        (lambda model: share(model, "pre_mlp_layernorm"), {M0, M1}),
        # Not called, and not changed.
        (lambda model: share(model, "mlp.linear_fc1", "mlp.linear_fc2"), set()),
        (share_weights, set()),  # one gradient, the sum over all that use it
        (share_layer, set()),  # and patched once
        (share_elsewhere, {A1, M0}),  # the other place that calls it expects Megatron's module
    ],
)
def test_patch_model_of_shared_modules(change, left, device):
    model, batch = tiny_gpt(), tiny_batch(1, device)
    change(model)
    before, expected = state(model), gradients(model, batch)
    with patched(model, ActivationConfig()) as report:
        assert set(report.left) == left
        assert all(" shared by " in reason for reason in report.left.values())
        assert report.patched == [b for b in BLOCKS if b not in left] and not report.unfused
        assert_close(gradients(model, batch), expected)
    assert state(model) == before
    assert_equal(gradients(model, batch), expected)


@pytest.mark.parametrize("invariant", [False, True])
def test_patch_model_that_fails_changes_nothing(invariant, monkeypatch):
    options = {} if invariant else selective("layernorm", "mlp")
    model, settings = tiny_gpt(**options), ActivationConfig(tp_invariant=invariant)
    before, set_, count = state(model), changes.Changes.set, 0

    def fail_later(self, *args):
        nonlocal count
        if count == 0:
            raise KeyError("no more")
        count -= 1
        set_(self, *args)

    monkeypatch.setattr(changes.Changes, "set", fail_later)
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
    unpatch_model(model)
    assert state(model) == before
