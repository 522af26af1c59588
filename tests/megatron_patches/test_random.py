"""Random models, parts of which are frozen and recomputed, against the same models unpatched.

A case is what its number draws. Some of them run every time, ``pytest -m slow`` runs hundreds;
``RANDOM_CASES=5000-5100`` in the environment are the ones to run instead of these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, unpatch_model
from tests.support import slow

from .tiny import (
    assert_equal,
    gradients,
    labelled_loss,
    selective,
    state,
    tiny_batch,
    tiny_gpt,
    tiny_loss,
)

FEW, MANY = range(6), range(6, 412)
if "RANDOM_CASES" in os.environ:
    first, _, end = os.environ["RANDOM_CASES"].partition("-")
    MANY = range(int(first), int(end))
PARTS = (
    *("embedding", "norm", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("bias", "layers.0", "layers.1", "output_layer", "weight"),
)
LOSS, GRADIENT, NOISE = 1e-2, 0.35, 0.02
"""Bounds on relative differences between FP8 and BF16: of losses; of gradients, and of the
largest gradient.
"""


class Case:
    """One random case, drawn from its number: model, settings, what is recomputed and trained."""

    def __init__(self, number: int) -> None:
        self.draw = draw = random.Random(number)
        one_of, chance = draw.choice, lambda p: draw.random() < p
        self.layers = one_of([2, 3])
        gated = chance(0.6)
        functions = [F.silu, F.gelu, quick_gelu] if gated else [F.gelu, quick_gelu, squared_relu]
        self.experts = chance(0.15)
        self.model: dict[str, Any] = {
            "seed": number,
            "num_layers": self.layers,
            "hidden_size": 128,
            "ffn_hidden_size": one_of([128, 144]),
            "normalization": one_of(["RMSNorm", "LayerNorm"]),
            "affine": chance(0.85),
            "gated_linear_unit": gated,
            "activation_func": one_of(functions),
            # Megatron's own experts fail with biases.
            "add_bias_linear": chance(0.3) and not self.experts,
            "add_qkv_bias": chance(0.3),
            "num_query_groups": one_of([None, 2, 1]),
            "kv_channels": one_of([None, 48]),
            "qk_layernorm": chance(0.3),
            "hidden_dropout": one_of([0.0, 0.0, 0.1]),
            "attention_dropout": one_of([0.0, 0.0, 0.1]),
            "gpt": {"share_embeddings_and_output_weights": chance(0.3),
                    "position_embedding_type": one_of(["rope", "rope", "learned_absolute"])},
        }  # fmt: skip
        if self.experts:
            self.model |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
            self.model["moe_shared_expert_intermediate_size"] = one_of([None, 64])
        self.settings: dict[str, Any] = {
            "forward": one_of(["exact", "quantized"]),
            "forward_scales": one_of(["row", "tensor"]),
            "loss": one_of(["chunked", "kept", "plain"]),
            "weights": one_of(["on_use", "cached"]),
        }
        if chance(0.25):
            self.settings["bf16_layers"] = (draw.randrange(-self.layers, self.layers),)
        self.recompute = self._recompute()
        core = "core_attn" in self.recompute.get("recompute_modules", ())
        if chance(0.25) and not core and not self.model["attention_dropout"]:
            self.settings["attention"] = "fp8"
        self.trained = self._trained()

    def _recompute(self) -> dict[str, Any]:
        draw = self.draw
        kind = draw.choice(["none", "full", "selective", "selective", "selective"])
        if kind == "full":
            method, count = draw.choice(["uniform", "block"]), draw.choice([1, self.layers])
            return {
                "recompute_granularity": "full",
                "recompute_method": method,
                "recompute_num_layers": count,
            }
        # With biases, backward of the recompute of an MLP that stays Megatron's never ends.
        stays = self.model["add_bias_linear"] and "bf16_layers" in self.settings
        modules = ["core_attn"] + ["mlp"] * (not stays) + ["moe"] * self.experts
        chosen = [m for m in modules if draw.random() < 0.6]
        return selective(*chosen) if kind != "none" and chosen else {}

    def _trained(self) -> Callable[[str], bool]:
        """Whether a parameter of this name is trained."""
        draw, kind = self.draw, self.draw.choice(["all", "norms", "one", "not one", "some", "some"])
        part, share, salt = draw.choice(PARTS), draw.random(), draw.random()
        if kind == "some":
            return lambda name: random.Random(f"{name}{salt}").random() < share
        if kind == "norms":
            part = "norm"
        return lambda name: kind == "all" or (part in name) != (kind == "not one")

    def check(self, device: str) -> None:
        batch, settings = tiny_batch(0, device), ActivationConfig(**self.settings)
        loss = tiny_loss if settings.loss == "plain" else labelled_loss
        plain, whole, model = (
            tiny_gpt(**self.model, **recompute) for recompute in ({}, {}, self.recompute)
        )
        expected, before = gradients(plain, batch, loss_of=loss), state(model)
        report = patch_model(model, settings)
        patch_model(whole, settings)
        assert set(report.left.values()) <= {"bf16_layers", "routing is not quantized"}, report
        flow = gradients(whole, batch, loss_of=loss)
        compare(flow, expected, self.experts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained(name))
        # Megatron's own checkpoints lose gradients where nothing before them is trained: these need
        # not be there.
        if (
            any(p.requires_grad for p in model.parameters())
            and self.recompute.get("recompute_granularity") != "full"
        ):
            value, found = gradients(model, batch, loss_of=loss)
            assert_equal(
                (value, {n: g for n, g in found.items() if g is not None}),
                (flow[0], {n: g for n, g in flow[1].items() if found[n] is not None}),
            )
            lost = [n for n, p in model.named_parameters() if p.requires_grad and found[n] is None]
            assert not lost or self.experts or "bf16_layers" in self.settings, lost
        model.requires_grad_(True)
        assert_equal(gradients(model, batch, loss_of=loss), flow)
        unpatch_model(model)
        assert state(model) == before


def compare(found: Any, expected: Any, experts: bool) -> None:
    assert found[0] == pytest.approx(expected[0], rel=LOSS * (3 if experts else 1))
    if experts:  # tokens may choose other experts
        return
    pairs = {n: (g.double(), expected[1][n].double()) for n, g in found[1].items() if g is not None}
    largest = max(float(b.square().mean().sqrt()) for _, b in pairs.values())
    for name, (a, b) in pairs.items():
        # Some gradients are sums that cancel: of the keys' bias, for one, which softmax does not
        # see.
        error, size = (float(x.square().mean().sqrt()) for x in (a - b, b))
        assert error <= GRADIENT * size + NOISE * largest, (name, error / size, error / largest)


@pytest.fixture(autouse=True)
def eager():
    """Megatron compiles quick_gelu. Compiled it rounds less often than eager, and torch.compile
    gives up compiling a function after some number of recompiles: bits of blocks in BF16 would
    depend on what ran before.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("number", [*FEW, *map(slow, MANY)])
def test_patch_model_of_a_random_model(number, device):
    Case(number).check(device)
