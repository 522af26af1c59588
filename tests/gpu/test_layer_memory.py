"""The peak of real layers on a GPU against the account of ``benchmarks/speed/layer_memory.py``."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "changes",
    [{}, {"forward": "quantized"}, {"attention": "fp8"}, {"forward_scales": "tensor"}],
    ids=["default", "quantized", "fp8 attention", "tensor scales"],
)
@pytest.mark.parametrize("tokens", [4096, 16384])
def test_nothing_is_held_that_is_not_accounted_for(one_rank, tokens, changes):
    from benchmarks.common import ROOT
    from benchmarks.speed.layer import measure, stack
    from benchmarks.speed.layer_memory import expected_peak
    from coat_dist import CoatConfig
    from launch.model.gpt import load_model_config
    from megatron_patches import patched

    model = load_model_config(ROOT / "configs/models/llama2-7b.json", ["num_layers=2"])
    settings = CoatConfig.parse({"activation": changes}).activation
    forward, gpt, x = stack(model, tokens)
    with patched(gpt, settings):
        found = measure(forward, gpt, x, model.num_layers)
    expected = expected_peak(model, tokens, settings)
    assert found["peak_bytes"] == pytest.approx(expected.bytes, rel=0.05), expected
