"""What a trace of a step, and samples of the host, are taken for."""

import re
import time

import pytest

from benchmarks.common import ROOT
from benchmarks.speed.sampler import Sampler
from benchmarks.speed.step_trace import communication_alone_ms, gaps, kind_of, kinds

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


@pytest.mark.parametrize(
    "name, kind",
    [
        (
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "communication",
        ),
        ("nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT", "products"),
        (
            "transformer_engine::fused_attn::extract_seed_and_offset(long*, bool, long*)",
            "attention",
        ),
        (
            "void at::native::(anonymous "
            "namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>",
            "copies",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10",
            "torch's element-wise",
        ),
        ("something", "other"),
    ],
)
def test_what_a_kernel_is_for(name, kind) -> None:
    assert kind_of(name) == kind


def test_every_kernel_of_ours_has_a_kind() -> None:
    files = [*(ROOT / "coat_dist").rglob("*.py"), *(ROOT / "megatron_patches").rglob("*.py")]
    names = {
        name
        for file in files
        for name in re.findall(r"@triton\.jit.*?\ndef (\w+_kernel)\(", file.read_text(), re.S)
    }
    assert len(names) > 20 and all(
        kind_of(name) in ("layers", "loss", "optimizer") for name in names
    )


def test_communication_that_nothing_hides() -> None:
    assert (
        communication_alone_ms(SPANS)
        == pytest.approx(0.020)
        == pytest.approx(gaps(SPANS)["communication_alone_ms"])
    )
    assert communication_alone_ms(SPANS[2:]) == 0
    assert communication_alone_ms(SPANS[1:2] * 2) == pytest.approx(0.025), "two at once are once"


def test_gaps() -> None:
    found = gaps(SPANS)
    assert found["span_ms"] == pytest.approx(0.4) and found["busy_ms"] == pytest.approx(
        0.03 + 0.008 + 0.05 + 0.098
    )
    counts = {key: value[0] for key, value in found["pauses"].items()}
    assert counts == {
        "from 0 us": 1,
        "from 10 us": 1,
        "from 30 us": 0,
        "from 100 us": 1,
        "from 1000 us": 0,
    }
    assert found["longest"][0] == {
        "us": 200,
        "at_ms": 0.05,
        "after": "_adamw_kernel",
        "before": "Memcpy DtoD",
    }
    assert sum(found["share_by_tenths"]) == pytest.approx(
        10 * (0.4 - found["busy_ms"]) / 0.4, abs=0.02
    )


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
