"""What the layer benchmark refuses before it measures anything, and the work it counts."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.speed import layer, te_layer
from benchmarks.speed.layer import SEQUENCE, flops
from launch.model.gpt import load_model_config


@pytest.fixture
def call(monkeypatch, tmp_path):
    def never(*_, **__):
        raise AssertionError("something was begun")

    monkeypatch.setattr(layer.dist, "init_process_group", never)

    def main(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["layer", "--output", str(tmp_path), *arguments])
        layer.main()

    return main


def test_presets_and_folders_that_have_no_peer(call, refused, tmp_path) -> None:
    """Refused before anything is measured; a preset alone is not."""
    wanted = "normalization 'layernorm', accepted: 'rmsnorm'; norm_affine False, accepted: True"
    with refused(f"error: --peers: got the preset 'olmo-1b' with {wanted}"):
        call("--presets", "llama3-8b", "olmo-1b", "--peers", "somewhere")
    with refused("with 0 archives, accepted: a folder with transformer_engine/"):
        call("--peers", str(tmp_path))
    with pytest.raises(AssertionError, match="begun"):
        call("--presets", "olmo-1b")


@pytest.mark.parametrize("name, recipe", te_layer.RECIPES.items())
def test_the_peers_layers_are_those_of_the_preset(monkeypatch, name, recipe) -> None:
    """In place of Transformer Engine, which needs a GPU, a module that keeps what it is told."""
    told, contexts = [], []

    class Layer(torch.nn.Linear):
        def __init__(self, hidden_size: int, *sizes: int, **settings: object) -> None:
            super().__init__(hidden_size, hidden_size, dtype=torch.bfloat16)
            told.append((hidden_size, *sizes, settings))

        def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
            assert rotary_pos_emb.shape == (8, 1, 1, 16)
            return super().forward(x)

    def autocast(**settings):
        contexts.append(settings)
        return nullcontext()

    monkeypatch.setattr(te_layer.dist, "get_world_size", lambda: 1)
    recipes = SimpleNamespace(DelayedScaling=lambda: "delayed")
    monkeypatch.setattr(te_layer.importlib, "import_module", lambda module: recipes)
    model = load_model_config(
        ROOT / "configs/models/llama3-8b.json",
        [
            "num_layers=2",
            "hidden_size=64",
            "ffn_hidden_size=96",
            "num_attention_heads=4",
            "num_query_groups=2",
        ],
    )
    te = SimpleNamespace(TransformerLayer=Layer, autocast=autocast)
    forward, layers, x = te_layer.stack(te, model, 24, recipe, 8)
    assert x.shape == (8, 3, 64) and len(layers) == 2
    forward().sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    (hidden, ffn, heads, settings), _ = told
    assert (hidden, ffn, heads, settings["num_gqa_groups"], settings["kv_channels"]) == (
        64,
        96,
        4,
        2,
        16,
    )
    assert contexts[0]["enabled"] == (name != "TE bf16") and contexts[0]["recipe"] == (
        "delayed" if recipe else None
    )


def test_bad_arguments_are_named(call, refused) -> None:
    with refused("--variants: invalid choice: 'coat row scales'"):
        call("--variants", "coat row scales")
    with refused("--presets: got nope, accepted: one of configs/models: llama-30b, "):
        call("--presets", "nope")
    with refused("error: --presets: tiny-moe: num_moe_experts: got 8, accepted: null"):
        call("--presets", "llama2-7b", "tiny-moe")
    with refused(f"error: --tokens: got 5000, accepted: a multiple of {SEQUENCE}"):
        call("--tokens", "4096", "5000")


def test_work_of_an_mlp_without_a_gate() -> None:
    gated, *plain = (
        flops(
            load_model_config(ROOT / "configs/models/llama2-7b.json", [f"activation={name}"]),
            SEQUENCE,
        )
        for name in ("swiglu", "gelu", "gelu_tanh", "quick_gelu", "squared_relu")
    )
    assert {gated - other for other in plain} == {6.0 * SEQUENCE * 4096 * 11008}
