"""Layouts of ranks: what is started, and what is said of the losses."""

from __future__ import annotations

import pytest

from benchmarks import results_render
from benchmarks.convergence import layouts
from benchmarks.convergence.flow_data import FULL
from benchmarks.convergence.layouts import Layout


def test_layouts_have_the_same_batches(capsys) -> None:
    four, two = layouts.parse([]), layouts.parse(["--ranks", "2"])
    assert list(map(str, four.layouts)) == ["tp1-zero2", "tp2-zero2", "tp4-zero1"]
    assert list(map(str, two.layouts)) == ["tp1-zero2", "tp2-zero2"]
    for layout in four.layouts:
        found = layouts.configuration(layout, FULL, 4 * FULL.micro_batch)
        assert found["train_batch_size"] == 128 and "gradient_accumulation_steps" not in found
        assert found["zero_optimization"]["stage"] == layout.stage and found["optimizer"]["type"] == "CoatAdamW"
        # samples of a step are whole micro-batches of each data-parallel rank
        assert found["train_batch_size"] % (found["train_micro_batch_size_per_gpu"] * 4 // layout.tp) == 0
    for wrong in ["tp3-zero2"], ["tp2-zero3"], ["tp0-zero1"], ["zero2"]:
        with pytest.raises(SystemExit):
            layouts.parse(["--layouts", *wrong])
        assert "accepted: " in capsys.readouterr().err


def test_gaps_are_to_the_first_layout() -> None:
    base = {"layout": "tp1-zero2", "losses": [8.0] + [4.0] * 10}
    one = layouts.compared({"layout": str(Layout(2, 2)), "losses": [7.6] + [4.002] * 10}, base)
    assert one["largest_loss_gap"] == pytest.approx(0.05) and one["last_ten_loss_gap"] == pytest.approx(0.0005)
    lines = results_render.layouts({"runs": [layouts.compared(base, base), one]})
    assert lines[2:] == [
        "| tp1-zero2 | 4.0000 | 0.00 % | +0.00 % |",
        "| tp2-zero2 | 4.0020 | 5.00 % | +0.05 % |",
    ]


def test_tables_of_four_gpus() -> None:
    runs = {"bf16": {"ms": 40.0, "ratio_to_bf16": 1.0}, "coat": {"ms": 24.0, "ratio_to_bf16": 0.6}}
    lines = results_render.over_four({"results": [{"preset": "llama2-13b", "runs": runs}]})
    assert lines[2:] == ["| llama2-13b, bf16 | 40.00 ms | 1.000 |", "| llama2-13b, coat | 24.00 ms | 0.600 |"]
    times = {
        "forward": {"span_us": 4000.0, "kinds": {"gather": {"us": 100.0}}},
        "backward": {"span_us": 6000.0, "kinds": {"all-reduce": {"us": 150.0}}},
    }
    lines = results_render.amax_collectives({"results": [{"preset": "llama2-13b", "runs": {"coat": {"times": times}}}]})
    assert lines[2:] == ["| llama2-13b, coat | 150 µs | 10000 µs | 1.50 % |"]
