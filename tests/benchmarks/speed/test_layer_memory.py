"""The account of a layer's peak memory, against what an allocator measured and against the docs'
bytes.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.common import ROOT, result_path
from benchmarks.speed.layer import VARIANTS
from benchmarks.speed.layer_memory import expected_peak, saved_bytes
from coat_dist import CoatConfig
from launch.model.gpt import load_model_config


def settings(**changes):
    return CoatConfig.parse({"activation": changes}).activation


def preset(name: str, *overrides: str):
    return load_model_config(ROOT / f"configs/models/{name}.json", overrides)


@pytest.mark.parametrize("name", ["layer", "layer-peers-7b"])
def test_recorded_runs_hold_nothing_that_is_not_accounted_for(name) -> None:
    measured = json.loads(result_path(f"speed/{name}").read_text())
    for result in measured["results"]:
        model = preset(result["preset"], f"num_layers={measured['settings']['layers']}")
        for variant in measured["settings"]["variants"]:
            run, chosen = result["runs"][variant], settings(**VARIANTS[variant])
            assert run["saved_bytes_per_token"] == pytest.approx(
                sum(saved_bytes(model, chosen)), rel=0.01
            )
            expected = expected_peak(model, result["tokens"], chosen)
            # 0.002 is the largest difference.
            assert run["peak_bytes"] == pytest.approx(expected.bytes, rel=0.005)


def test_saved_bytes_are_those_of_the_documentation() -> None:
    model = preset("llama2-7b")
    assert saved_bytes(model, settings()) == (4228, 32896, 26932)
    assert saved_bytes(model, settings(attention="fp8")) == (4228, 17024, 26932)


def test_where_the_peak_lies() -> None:
    many, few = (
        expected_peak(preset("llama2-7b", "num_layers=4"), t, settings()) for t in (16384, 1024)
    )
    assert (many.layer, few.layer) == (4, 1)
    deeper = expected_peak(preset("llama2-7b", "num_layers=5"), 16384, settings())
    assert deeper.bytes - many.bytes == 16384 * 64056  # one more layer waits


@pytest.mark.parametrize(
    "key, value, accepted",
    [
        ("qk_norm", "true", "false"),
        ("num_moe_experts", "8", "null"),
        ("linear_bias", "true", "false"),
    ]
    + [(f"{what}_dropout", "0.1", "0.0") for what in ("hidden", "attention")],
)
def test_what_is_not_accounted_for_is_refused(key, value, accepted) -> None:
    with pytest.raises(ValueError, match=f"^{key}: got {value}, accepted: {accepted} "):
        expected_peak(preset("llama2-7b", f"{key}={value}"), 4096, settings())


def test_an_mlp_without_a_gate_saves_one_tensor_of_its_size() -> None:
    f = preset("llama2-7b").ffn_hidden_size
    gated = sum(saved_bytes(preset("llama2-7b"), settings()))
    for activation in ("gelu", "gelu_tanh", "quick_gelu", "squared_relu"):
        plain = sum(saved_bytes(preset("llama2-7b", f"activation={activation}"), settings()))
        assert gated - plain == f + f // 32  # one byte of scale a group
