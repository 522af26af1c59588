"""Random models, parts of which are frozen, shared and recomputed, against the same models unpatched.

A case is what its number draws. Some of them run every time, ``pytest -m slow`` runs hundreds;
``RANDOM_CASES=5000-5100`` in the environment are the ones to run instead of these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.mlp import MLP

from coat_dist.config import ActivationConfig
from megatron_patches import patch_model, rng_state, set_rng_state, unpatch_model

from .tiny import tiny_batch, tiny_gpt, tiny_loss

FEW, MANY = range(6), range(6, 412)
if "RANDOM_CASES" in os.environ:
    first, _, end = os.environ["RANDOM_CASES"].partition("-")
    MANY = range(int(first), int(end))

MODULES = ["mlp", "self_attention", "input_layernorm", "pre_mlp_layernorm", "self_attention.linear_qkv",
           "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]  # fmt: skip


class Case:
    """One random case, drawn from its number: model, settings, what is recomputed, shared and trained, batches."""

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
            "add_bias_linear": chance(0.3) and not self.experts,  # Megatron's own experts fail with biases
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
            "loss": one_of(["chunked", "chunked", "plain"]),
            "weights": one_of(["on_use", "cached"]),
        }
        if chance(0.25):
            self.settings["bf16_layers"] = (draw.randrange(-self.layers, self.layers),)
        self.recompute = self._recompute()
        core = "core_attn" in self.recompute.get("recompute_modules", ())
        if chance(0.25) and not core and not self.model["attention_dropout"]:
            self.settings["attention"] = "fp8"
        self.shared = draw.sample(MODULES, draw.randrange(1, 4)) if chance(0.35) else []
        if self.experts:
            self.shared = [m for m in self.shared if not m.startswith("mlp.")]
        if self.model["add_bias_linear"] and (self.shared or "bf16_layers" in self.settings):
            # An MLP that may stay Megatron's: with biases, backward of its recompute never ends.
            rest = [m for m in self.recompute.get("recompute_modules", ()) if m != "mlp"]
            if "recompute_modules" in self.recompute:
                self.recompute = self.recompute | {"recompute_modules": rest} if rest else {}
        self.by_weight = chance(0.3)
        self.same_layer = chance(0.1)
        self.batches = one_of([1, 1, 2, 3])
        self.trained = self._trained()

    def _recompute(self) -> dict[str, Any]:
        draw = self.draw
        kind = draw.choice(["none", "full", "selective", "selective", "selective"])
        if kind == "full":
            method, count = draw.choice(["uniform", "block"]), draw.choice([1, self.layers])
            return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
        modules = ["mlp", "core_attn"] + (["moe"] if self.experts else [])
        chosen = [m for m in modules if draw.random() < 0.6]
        return {"recompute_granularity": "selective", "recompute_modules": chosen} if kind != "none" and chosen else {}

    def _trained(self) -> Any:
        """Whether a parameter of this name is trained."""
        draw, kind = self.draw, self.draw.choice(["all", "from", "norms", "one", "not one", "some", "some"])
        parts = ["embedding", "norm", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "bias", "layers.0",
                 "layers.1", "output_layer", "weight"]  # fmt: skip
        part, start, share, salt = draw.choice(parts), draw.randrange(4 * self.layers), draw.random(), draw.random()
        if kind == "from":  # all parts of the layers, from one of them on
            order = ["input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"]

            def position(name: str) -> int:
                if "embedding" in name:
                    return -1
                if ".layers." not in name:
                    return 4 * self.layers
                layer, what = name.split(".layers.")[1].split(".")[:2]
                return 4 * int(layer) + order.index(what)

            return lambda name: position(name) >= start
        if kind == "some":
            return lambda name: random.Random(f"{name}{salt}").random() < share
        return {
            "all": lambda name: True,
            "norms": lambda name: "norm" in name,
            "one": lambda name: part in name,
            "not one": lambda name: part not in name,
        }[kind]

    def build(self, recompute: dict[str, Any]) -> Any:
        model = tiny_gpt(**self.model, **recompute)
        layers = model.decoder.layers
        if self.same_layer:
            layers[1] = layers[0]
        for path in self.shared:
            parent, _, key = path.rpartition(".")
            source, target = (layer.get_submodule(parent) for layer in (layers[0], layers[1]))
            if not self.by_weight:
                setattr(target, key, getattr(source, key))
                continue
            theirs = dict(getattr(target, key).named_modules())
            for name, module in getattr(source, key).named_modules():
                for attribute, parameter in module.named_parameters(recurse=False):
                    setattr(theirs[name], attribute, parameter)
        return model

    def freeze(self, model: Any) -> None:
        names = {}
        for name, parameter in model.named_parameters():
            names[name] = self.trained(name)
            parameter.requires_grad_(names[name])
        if not any(names.values()):
            model.decoder.layers[0].mlp.requires_grad_(True)

    def run(self, model: Any, device: str) -> tuple[list[float], dict[str, torch.Tensor | None]]:
        """Losses of the micro-batches and their gradients' sum. No gradient at all where none can be had."""
        *_, (losses, gradients) = self.batch_by_batch(model, device, False)
        return losses, gradients

    def batch_by_batch(self, model: Any, device: str, apart: bool = True) -> Iterator[Any]:
        """Losses so far and gradients after each micro-batch: with ``apart`` its own, else the sum."""
        set_rng_state(self.state)
        model.zero_grad(set_to_none=True)
        losses = []
        for i in range(self.batches):
            if apart:
                model.zero_grad(set_to_none=True)
            loss = self.loss(model, tiny_batch(i, device))
            losses.append(loss.item())
            if loss.requires_grad:
                loss.backward()
            yield losses, {n: p.grad for n, p in model.named_parameters()}

    def loss(self, model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean loss: the model's own, given labels, which the chunked loss replaces; or, if plain, of its logits."""
        if self.settings["loss"] == "plain":
            return tiny_loss(model, batch)
        tokens, labels, positions = batch
        return model(tokens, positions, None, labels=labels).mean()

    def check(self, device: str) -> None:
        self.state = rng_state()
        # Checkpoints that are Megatron's own lose gradients where nothing before them is trained. These stay as they
        # are; the others must not be seen.
        modules = self.recompute.get("recompute_modules", ["full"])
        kept = [m for m in modules if m in ("full", "moe")]
        theirs = self.recompute | {"recompute_modules": kept} if kept == ["moe"] else self.recompute if kept else {}
        plain, model, whole = (self.build(recompute) for recompute in (theirs, self.recompute, {}))
        for each in (plain, model):
            self.freeze(each)
        before = [(type(m), dict(vars(m))) for m in model.modules()]
        settings = ActivationConfig(**self.settings)
        try:
            report = patch_model(model, settings)
        except ValueError as problem:
            assert "nothing to patch" in str(problem) and (self.shared or "bf16_layers" in str(problem)), problem
            assert [(type(m), dict(vars(m))) for m in model.modules()] == before
            return
        patch_model(whole, settings)
        assert set(report.left.values()) <= {"bf16_layers", "routing is not quantized"} or self.shared, report
        for layer, same in zip(plain.decoder.layers, model.decoder.layers, strict=True):
            if "mlp" in modules and type(same.mlp) is MLP:  # stays Megatron's, and so does its checkpoint
                layer.recompute_mlp = True
        expected, found, everything = (self.run(each, device) for each in (plain, model, whole))
        self.compare(found, expected, everything, device)
        if self.shared or self.same_layer:
            self.compare_uses(whole, settings, device)
        unpatch_model(model)
        assert [(type(m), dict(vars(m))) for m in model.modules()] == before
        patch_model(plain, settings)
        unpatch_model(plain)
        again = self.run(plain, device)
        assert again[0] == expected[0]
        assert_equal(again[1], expected[1], device)

    def compare_uses(self, whole: Any, settings: ActivationConfig, device: str) -> None:
        """With parameters that have several uses, recompute alone and freezing alone change no bit of a micro-batch.

        Together they may: Megatron's own checkpoints lose the gradient of one use where nothing before it is trained.
        So may several micro-batches: a checkpoint adds one use's gradient to what is there, autograd the sum of all.
        """
        recomputed, frozen = self.build(self.recompute), self.build({})
        self.freeze(frozen)
        expected = list(self.batch_by_batch(whole, device))
        for model in (recomputed, frozen):
            patch_model(model, settings)
            for (losses, ours), (all_losses, theirs) in zip(self.batch_by_batch(model, device), expected, strict=True):
                assert losses == all_losses[: len(losses)]
                assert_equal({n: g for n, g in ours.items() if g is not None}, theirs, device)

    def compare(self, found: Any, expected: Any, everything: Any, device: str) -> None:
        differ = [n for n, g in found[1].items() if (g is None) != (expected[1][n] is None)]
        # Megatron's LinearWithFrozenWeight returns no gradient of its bias; a patched linear does.
        differ = [n for n in differ if found[1][n] is None or not n.endswith("linear_qkv.bias")]
        assert not differ
        # Neither recompute nor freezing changes any bit of what is computed.
        assert found[0] == everything[0]
        if not self.shared and not self.same_layer:
            assert_equal({n: g for n, g in found[1].items() if g is not None}, everything[1], device)
        assert found[0] == pytest.approx(expected[0], rel=LOSS * (3 if self.experts else 1))
        if self.experts:  # tokens may choose other experts
            return
        pairs = {
            n: (g.double(), expected[1][n].double())
            for n, g in found[1].items()
            if g is not None and expected[1][n] is not None
        }
        largest = max((float(b.square().mean().sqrt()) for _, b in pairs.values()), default=0.0)
        for name, (a, b) in pairs.items():
            # Some gradients are sums that cancel: of the keys' bias, for one, which softmax does not see.
            error, size = (float(x.square().mean().sqrt()) for x in (a - b, b))
            assert error <= GRADIENT * size + NOISE * largest, (name, error / size, error / largest)


LOSS, GRADIENT, NOISE = 1e-2, 0.35, 0.02
"""Bounds on relative differences between FP8 and BF16: of losses; of gradients, and of the largest gradient."""


def assert_equal(found: dict, expected: dict, device: str) -> None:
    for name, gradient in found.items():
        if device == "cpu" and gradient is not None:  # a GPU's attention backward is not deterministic
            assert torch.equal(gradient, expected[name]), name


@pytest.fixture(autouse=True)
def eager():
    """Megatron compiles quick_gelu. Compiled it rounds less often than eager, and torch.compile gives up compiling a
    function after some number of recompiles: bits of blocks in BF16 would depend on what ran before."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("number", FEW)
def test_a_few(number, device):
    Case(number).check(device)


@pytest.mark.slow
@pytest.mark.parametrize("number", MANY)
def test_many(number, device):
    Case(number).check(device)
