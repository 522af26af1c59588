"""What the layer benchmark refuses before it measures anything, and the work it counts."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.common import ROOT, result_path
from benchmarks.speed import layer
from benchmarks.speed.layer import SEQUENCE, VARIANTS, flops
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


@pytest.mark.parametrize(
    "preset, message",
    [
        ("llama3-8b", "'llama3-8b' with num_query_groups 8, accepted: 32$"),
        (
            "olmo-1b",
            "'olmo-1b' with normalization 'layernorm', accepted: 'rmsnorm'; norm_affine False, accepted: True$",
        ),
    ],
)
def test_presets_that_the_peers_program_does_not_build(call, preset, message) -> None:
    with pytest.raises(ValueError, match=f"^--peers: got the preset {message}"):
        call("--presets", "llama2-7b", preset, "--peers", "somewhere")
    with pytest.raises(AssertionError, match="begun"):
        call("--presets", preset)


def test_other_activations_are_refused_with_peers() -> None:
    model = load_model_config(ROOT / "configs/models/llama2-7b.json", ["activation=geglu", "head_size=64"])
    with pytest.raises(ValueError, match="head_size 64, accepted: 128; activation 'geglu', accepted: 'swiglu'"):
        layer.check_transformer_engine_has("mine", model)


def test_bad_arguments_are_named(call, capsys) -> None:
    with pytest.raises(SystemExit):
        call("--variants", "coat row scales")
    assert "--variants: invalid choice: 'coat row scales'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="^--presets: tiny-moe: num_moe_experts: got 8, accepted: null"):
        call("--presets", "llama2-7b", "tiny-moe")
    with pytest.raises(ValueError, match=f"^--tokens: got 5000, accepted: a multiple of {SEQUENCE}"):
        call("--tokens", "4096", "5000")


def test_work_of_an_mlp_without_a_gate() -> None:
    gated, *plain = (
        flops(load_model_config(ROOT / "configs/models/llama2-7b.json", [f"activation={name}"]), SEQUENCE)
        for name in ("swiglu", "gelu", "gelu_tanh", "quick_gelu", "squared_relu")
    )
    assert {gated - other for other in plain} == {6.0 * SEQUENCE * 4096 * 11008}


@pytest.mark.parametrize("name", ["layer", "layer-small", "layer-peers"])
def test_recorded_variants_are_those_that_can_be_measured(name) -> None:
    found = json.loads(result_path(f"speed/{name}").read_text())
    assert set(found["settings"]["variants"]) <= set(VARIANTS)
    for result in found["results"]:
        assert set(found["settings"]["variants"]) <= set(result["runs"])
