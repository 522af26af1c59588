"""The benchmark of weights on a CPU, tiny, with a clock that counts nothing: its calls work. Numbers need a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.common import result_path
from benchmarks.speed import weights

FLOORS = {"on use, tensor scale": 8, "on use, row scales": 6, "cached, tensor scale": 2}
"""Bytes an element that have to be moved."""


def test_weights(monkeypatch) -> None:
    monkeypatch.setattr(weights, "DEVICE", "cpu")
    monkeypatch.setattr(weights, "CACHE", 2**14)
    turns = []
    monkeypatch.setattr(weights, "graph_ms", lambda calls: turns.append(len([c() for c in calls])) or 0.5)
    found = weights.one((32, 64), 48, 4e12)
    assert set(turns) == {4}  # 4 KiB a weight
    assert found["wgrad into main_grad_us"] == 500
    floors = {name: found[f"floor {name}_us"] for name in FLOORS}
    assert floors == pytest.approx({name: 32 * 64 * n / 4e6 for name, n in FLOORS.items()})


def test_recorded_weights_have_the_floors_of_their_shapes() -> None:
    found = json.loads(result_path("speed/weights").read_text())
    h, f = found["settings"]["hidden"], found["settings"]["ffn"]
    elements = {"qkv": 3 * h * h, "proj": h * h, "fc1": 2 * f * h, "fc2": h * f}
    for row in [*found["weights"], {"weight": "layer", **found["layer"]}]:
        n = elements.get(row["weight"], sum(elements.values()))
        for name, size in FLOORS.items():
            assert row[f"floor {name}_us"] == pytest.approx(n * size / found["copy_bytes_per_second"] * 1e6)


def test_ways_of_a_weights_gradient_agree(monkeypatch) -> None:
    monkeypatch.setattr(weights, "DEVICE", "cpu")
    d8_t, x8_t = weights.operand(32, 48), weights.operand(64, 48)
    calls = weights.calls((32, 64), d8_t, x8_t)
    codes = calls["on use: W8 transposed"]().codes, calls["cached: W8 transposed, tensor scale"]().codes
    assert torch.equal(*(c.view(torch.uint8) for c in codes))
    assert calls["wgrad returned"]().shape == (32, 64) and calls["wgrad into main_grad"]() is None
