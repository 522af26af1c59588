"""That transformers models are measured, and compared with the best of their peers."""

import json
import sys

import pytest

from benchmarks.speed import hf

pytest.importorskip("transformers")


def test_a_variant_is_measured(tmp_path, monkeypatch) -> None:
    line = (
        "hf --model tiny --variants coat+flow --stage 3 --sequence 32 --micro-batches 1 2 "
        "--warm-up 1 --steps 1"
    )
    monkeypatch.setattr(sys, "argv", [*line.split(), "--output", str(tmp_path)])
    hf.main()
    (found,) = json.loads((tmp_path / "speed/hf.json").read_text())["variants"]
    assert [step["micro_batch"] for step in found["steps"]] == [1, 2] and "error" not in found
    assert found["steps"][1]["last_loss"] == pytest.approx(5.5, abs=0.3)


def test_ratios_are_to_the_best_peer() -> None:
    speeds = {"adamw": 10.0, "coat+liger": 20.0, "coat+flow": 30.0}
    step = {"micro_batch": 8, "step_ms": 1.0, "peak_gib": 1.0, "first_loss": 1.0, "last_loss": 1.0}
    found = [
        {"variant": v, "steps": [{**step, "tokens_per_second_per_gpu": s}]}
        for v, s in speeds.items()
    ]
    hf.compare(found)
    assert [one["steps"][0]["to_best_peer"] for one in found] == [0.5, 1.0, 1.5]
