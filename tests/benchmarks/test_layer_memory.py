"""The account of a layer's peak memory, against what an allocator measured and against the docs' bytes."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.layer import ROOT
from benchmarks.layer_memory import expected_peak, saved_bytes
from coat_dist import CoatConfig
from launch.model import load_model_config

MEASURED = json.loads((RESULTS / "layer.json").read_text())


def settings(**changes):
    return CoatConfig.parse({"activation": changes}).activation


def preset(name: str, *overrides: str):
    return load_model_config(ROOT / f"configs/models/{name}.json", overrides)


def test_recorded_runs_hold_nothing_that_is_not_accounted_for() -> None:
    for result in MEASURED["results"]:
        planned = sum(saved_bytes(preset(result["preset"]), settings()))
        assert result["runs"]["coat"]["saved_bytes_per_token"] == pytest.approx(planned, rel=0.01)
        for run in result["runs"].values():  # of what the code that was measured was expected to hold
            assert run.get("peak_to_expected", 1.0) == pytest.approx(1, abs=0.05)


def test_saved_bytes_are_those_of_the_documentation() -> None:
    model = preset("llama2-7b")
    assert saved_bytes(model, settings()) == (4228, 32896, 26932)
    assert saved_bytes(model, settings(attention="fp8")) == (4228, 17024, 26932)


def test_where_the_peak_lies() -> None:
    many, few = (expected_peak(preset("llama2-7b", "num_layers=4"), t, settings()) for t in (16384, 1024))
    assert (many.layer, few.layer) == (4, 1)
    deeper = expected_peak(preset("llama2-7b", "num_layers=5"), 16384, settings())
    assert deeper.bytes - many.bytes == 16384 * 64056  # one more layer waits


def test_norms_on_queries_and_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="qk_norm"):
        expected_peak(preset("llama2-7b", "qk_norm=true"), 4096, settings())
