"""Experts in grouped products: built without the package grouped_gemm, and patched."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

from coat_dist.config import ActivationConfig
from coat_dist.patching.classes import swapped
from megatron_patches import patch_model, patched
from megatron_patches.layers.dispatch import LocalDispatcher, may_stay_local
from megatron_patches.layers.grouped import FP8GroupedMLP, GroupedExperts

from .tiny import HIDDEN, assert_equal, gradients, tiny_batch, tiny_gpt

EXPERTS = {"num_moe_experts": 3, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
MANY = {
    "num_moe_experts": 8,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_ffn_hidden_size": 64,
}
GROUPED_GEMM = {"moe_grouped_gemm": True, "add_bias_linear": False}
PLAIN = {"gated_linear_unit": False, "activation_func": F.gelu}


def as_stored(experts: SequentialMLP) -> tuple[torch.Tensor, torch.Tensor]:
    """weight1 and weight2 of a ``GroupedMLP`` with the same experts."""
    fc1 = torch.stack([e.linear_fc1.weight.t() for e in experts.local_experts])
    fc2 = torch.stack([e.linear_fc2.weight.t() for e in experts.local_experts])
    return fc1.reshape(HIDDEN, -1), fc2.reshape(-1, HIDDEN)


def both(**options):
    """The same model with experts one by one and in grouped products."""
    one_by_one = tiny_gpt(add_bias_linear=False, **options)
    grouped = tiny_gpt(**GROUPED_GEMM, **options)
    state = {n: p for n, p in one_by_one.named_parameters() if ".local_experts." not in n}
    for i, layer in enumerate(one_by_one.decoder.layers):
        name = f"decoder.layers.{i}.mlp.experts."
        state |= dict(
            zip((name + "weight1", name + "weight2"), as_stored(layer.mlp.experts), strict=True)
        )
    grouped.load_state_dict(state)
    return one_by_one, grouped


def test_grouped_experts_without_the_package(device):
    """Its own class, Megatron's parameters; loss and gradients are those of a SequentialMLP but
    for rounding.
    """
    assert grouped_gemm_util.grouped_gemm is None or device != "cpu"
    one_by_one, grouped = both(**EXPERTS)
    experts = grouped.decoder.layers[0].mlp.experts
    assert type(experts) is GroupedExperts and isinstance(experts, GroupedMLP)
    shapes = {n: tuple(p.shape) for n, p in experts.named_parameters()}
    assert shapes == {"weight1": (HIDDEN, 3 * 2 * 64), "weight2": (3 * 64, HIDDEN)}
    batch = tiny_batch(0, device)
    (loss, grads), (wanted, reference) = gradients(grouped, batch), gradients(one_by_one, batch)
    assert loss == pytest.approx(wanted, rel=1e-3)
    for i in range(3):
        fc1 = reference[f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight"]
        got = grads["decoder.layers.0.mlp.experts.weight1"].view(3, HIDDEN, -1)[i].t()
        assert F.cosine_similarity(fc1.flatten().float(), got.flatten().float(), dim=0) > 0.999


def assert_near(got, wanted, name):
    assert (got.float() - wanted.float()).norm() <= 0.15 * wanted.float().norm(), name


@pytest.mark.parametrize(
    ("options", "settings"),
    [(EXPERTS | PLAIN, {"forward_scales": "tensor", "weights": "cached"})]
    + [(EXPERTS, {}), (MANY | {"moe_apply_probs_on_input": True}, {})],
)
def test_grouped_experts_patched_are_those_of_one_by_one(options, settings, device):
    """The loss to the bit. Gradients but for rounding: here one scale serves all experts
    (tests/coat_dist/flow/test_grouped.py has their bits). Class, keys and the BF16 loss come back.
    """
    if device != "cpu":
        pytest.skip("sums of tensor cores depend on the product's shape")
    one_by_one, grouped = both(**options)
    batch = tiny_batch(0, device)
    before, keys = gradients(grouped, batch)[0], list(grouped.state_dict())
    settings = ActivationConfig(**settings)
    patch_model(one_by_one, settings)
    with patched(grouped, settings) as report:
        assert [n for n in report.patched if "experts" in n] == [
            f"decoder.layers.{i}.mlp.experts" for i in range(2)
        ]
        assert not any("experts" in n for n in report.left)
        assert isinstance(grouped.decoder.layers[0].mlp.experts, FP8GroupedMLP)
        (loss, grads), (wanted, reference) = gradients(grouped, batch), gradients(one_by_one, batch)
        assert list(grouped.state_dict()) == keys
    assert loss == wanted != before
    for name, grad in grads.items():
        if ".experts." not in name:
            assert_near(grad, reference[name], name)
    for i, layer in enumerate(one_by_one.decoder.layers):
        for e in layer.mlp.experts.local_experts:
            for fc in (e.linear_fc1, e.linear_fc2):
                fc.weight.data = (
                    fc.weight.grad if fc.weight.grad is not None else torch.zeros_like(fc.weight)
                )
        for name, wanted in zip(("weight1", "weight2"), as_stored(layer.mlp.experts), strict=True):
            assert_near(grads[f"decoder.layers.{i}.mlp.experts.{name}"], wanted, name)
    assert type(grouped.decoder.layers[0].mlp.experts) is GroupedExperts
    assert gradients(grouped, batch)[0] == before


def test_local_dispatch_has_the_bits_of_megatrons(device):
    """Two experts a token: one addition, which both round once. Only patched layers of one rank
    dispatch so.
    """
    model, batch = tiny_gpt(**EXPERTS), tiny_batch(0, device)
    dispatchers = [layer.mlp.token_dispatcher for layer in model.decoder.layers]
    expected = gradients(model, batch)
    for dispatcher in dispatchers:
        dispatcher.__class__ = swapped(MoEAllGatherTokenDispatcher, LocalDispatcher)
    found = gradients(model, batch)
    if device == "cpu":
        assert_equal(found, expected)
    for dispatcher in dispatchers:
        dispatcher.__class__ = MoEAllGatherTokenDispatcher
    dispatchers[0].config = copy.copy(dispatchers[0].config)
    with patched(model, ActivationConfig(bf16_layers=(1,))):
        assert [type(d) for d in dispatchers] == [
            swapped(MoEAllGatherTokenDispatcher, LocalDispatcher),
            MoEAllGatherTokenDispatcher,
        ]
    assert {type(d) for d in dispatchers} == {MoEAllGatherTokenDispatcher}
    dispatchers[0].config.moe_permute_fusion = True
    assert not may_stay_local(dispatchers[0]) and may_stay_local(dispatchers[1])
