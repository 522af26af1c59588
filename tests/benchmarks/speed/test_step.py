"""What a trace of a step, and samples of the host, are taken for."""

import time

import pytest

from benchmarks.speed.step import Sampler, gaps, kinds

SPANS = [
    (0, 10_000, "nvjet_sm90"),
    (5_000, 30_000, "ncclDevKernel_AllGather"),
    (42_000, 50_000, "_adamw_kernel"),
    (250_000, 300_000, "Memcpy DtoD"),
    (302_000, 400_000, "something else"),
]


def test_kinds() -> None:
    found = kinds(SPANS)
    assert {kind: row["count"] for kind, row in found.items()} == {
        **{"other": 1, "copies": 1, "communication": 1, "products": 1, "optimizer": 1}
    }
    assert found["communication"]["ms"] == pytest.approx(0.025) and next(iter(found)) == "other"


def test_gaps() -> None:
    found = gaps(SPANS)
    assert found["span_ms"] == pytest.approx(0.4) and found["busy_ms"] == pytest.approx(0.03 + 0.008 + 0.05 + 0.098)
    counts = {key: value[0] for key, value in found["pauses"].items()}
    assert counts == {"from 0 us": 1, "from 10 us": 1, "from 30 us": 0, "from 100 us": 1, "from 1000 us": 0}
    assert found["longest"][0] == {"us": 200, "at_ms": 0.05, "after": "_adamw_kernel", "before": "Memcpy DtoD"}
    assert sum(found["share_by_tenths"]) == pytest.approx(10 * (0.4 - found["busy_ms"]) / 0.4, abs=0.02)


def busy(seconds) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += 1
    return count


def test_samples() -> None:
    with Sampler() as sampler:
        busy(0.3)
    mine = sum(n for name, n in sampler.functions.items() if name.endswith("test_step.py busy"))
    assert 50 < mine <= sampler.samples  # other threads, as of those that run tests, are seen too
    assert sum(sampler.lines.values()) == sampler.samples
