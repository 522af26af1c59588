"""Arithmetic of the benchmarks that published numbers depend on, by hand: times, ratios, gaps of
losses, and how a case ends.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from benchmarks import timing
from benchmarks.accuracy.trajectories import Trained, measure, ratios
from benchmarks.accuracy.trajectory_gradients import Gradients
from benchmarks.common import dumps, result_path, write_json
from benchmarks.convergence import grpo, pairs, pairs_run
from benchmarks.convergence.pairs_report import plot, report
from benchmarks.ranks import OUT_OF_MEMORY, Ended
from benchmarks.speed import families, fsdp, hf, megatron_loop, step_trace, train, whole
from benchmarks.speed.layer import SEQUENCE, VARIANTS, flops
from benchmarks.speed.layer_memory import expected_peak, saved_bytes
from benchmarks.speed.whole_report import equal, largest
from coat_dist import CoatConfig
from launch.model.gpt import load_model_config


def test_median_takes_the_larger_of_two_in_the_middle() -> None:
    assert [timing.median(values) for values in ([5, 1, 3], [4, 1, 3, 2], [7])] == [3, 3, 7]


def test_stages_ms_times_each_stage_of_the_middle_repetition(monkeypatch) -> None:
    """An event's time is the number of calls before it, squared."""
    happened: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = sum(what != "record" for what in happened) ** 2
            happened.append("record")

        def elapsed_time(self, end: Event) -> int:
            assert happened[-1] == "synchronize"
            return end.at - self.at

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: happened.append("synchronize"))
    stages = [lambda: happened.append("forward"), lambda: happened.append("backward")]
    assert timing.stages_ms(stages, 3) == [3**2 - 2**2, 4**2 - 3**2]
    assert happened == ["record", "forward", "record", "backward", "record"] * 3 + ["synchronize"]
    happened.clear()
    assert timing.timed(lambda: happened.append("call"), 5) == 6**2 - 5**2  # three to warm up


def test_gaps_are_means_over_seeds_that_both_have(tmp_path) -> None:
    losses = {"bf16": [2.0, 4.0, 1.0], "coat": [2.02, 4.12, torch.nan], "flow": [2.0]}
    runs = [
        {
            "variant": variant,
            "seed": seed,
            "held_out_loss": loss,
            "held_out_loss_bf16": loss * 2 ** (variant != "bf16"),
        }
        for variant, of_seeds in losses.items()
        for seed, loss in reversed(list(enumerate(of_seeds)))
    ]
    coat, flow = rows = report(runs)
    assert (coat["pairs"], coat["diverged"], flow["pairs"]) == (2, 1, 1) and "gap_se" not in flow
    found = [coat[key] for key in ("gap", "gap_sd", "gap_se", "gap_in_bf16")]
    assert found == pytest.approx([2.0, 2.0**0.5, 1.0, 104.0])
    plot(rows, tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 5000


@pytest.mark.parametrize(("variant", "steps"), [("coat from 5%", 5), ("coat until 80%", 11)])
def test_a_run_that_was_saved_ends_as_one_that_was_not(
    tmp_path, monkeypatch, variant, steps
) -> None:
    (tmp_path / "text.json").write_text('{"dtype": "uint16"}')
    torch.randint(8, (999 * 16,)).short().numpy().tofile(tmp_path / "text.bin")
    line = "--layers 1 --sequence 16 --batch 4 --micro-batch 2 --steps 12 --vocabulary 64"
    settings = pairs.settings(pairs.parse(line.split()), {"digest": "", "tokens": 1})
    job = {"variant": variant, "seed": 3, "settings": settings}
    job |= {"text": str(tmp_path / "text"), "graph": True, "saved": str(tmp_path / "run.pt")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole = pairs_run.train(job | {"deadline": float("inf")})
    monkeypatch.setattr(pairs_run.time, "monotonic", itertools.count().__next__)
    assert pairs_run.train(job | {"deadline": steps - 1}) == {"stopped": steps}
    resumed = pairs_run.train(job | {"deadline": float("inf")})
    assert resumed | {"seconds": 0} == whole | {"seconds": 0}
    assert whole["curve"][0] > whole["training_loss"]


def step(ms: float, **more: Any) -> dict[str, Any]:
    speeds = {"step_ms": ms, "tokens_per_second_per_gpu": 1000 / ms, "peak_gib": 2.0}
    losses = {"losses": [2.0, 1.0], "first_loss": 2.0, "last_loss": 1.0}
    return {
        "micro_batch": 8,
        "sequence": 2048,
        "state_bytes_per_parameter": 8.0,
        **speeds,
        **losses,
        **more,
    }


def test_gaps_of_rewards_are_taken_seed_by_seed() -> None:
    runs = [{"name": name, "last": last} for last in (1, 4) for name in ("bf16", "coat")]
    runs[1]["last"], runs[3]["last"] = 2, 7
    _, one = grpo.compare(runs, "last")
    assert one["gap"] == 2 and one["gap_se"] == pytest.approx(1)  # 1 and 3


@pytest.mark.parametrize(
    ("compare", "key", "times", "expected"),
    [
        (hf.compare, "to_best_peer", {"adamw": 4, "coat+liger": 2, "coat+flow": 1}, [0.5, 1, 2]),
        (families.compare, "to_best_peer", {"bf16": 4, "liger": 2, "coat": 1}, [2, 1, 0.5]),
        (families.compare, "to_bf16", {"bf16": 4, "liger": 2, "coat": 1}, [1, 0.5, 0.25]),
        (megatron_loop.compare, "tokens_per_second_ratio", {"bf16": 4, "TE fp8": 2}, [0.5, 1]),
    ],
)
def test_ratios_are_to_their_base(compare, key, times, expected) -> None:
    found = [step(ms, variant=name, steps=[step(ms)]) for name, ms in times.items()]
    compare(found)
    assert [(one | one["steps"][0])[key] for one in found] == expected


def test_ratios_of_training_are_to_the_first_and_gaps_to_bf16() -> None:
    te, bf16, ours = (
        step(ms, config=config, peak_memory_gib=1.0, losses=losses)
        for config, ms, losses in (
            ("TE bf16", 4, [4.0, 1.0]),
            ("zero2-bf16", 2, [4.0, 2.0]),
            ("zero2", 1, [4.2, 2.0]),
        )
    )
    train.compare([te, bf16, ours])
    assert (ours["step_time_ratio"], ours["tokens_per_second_ratio"]) == (0.25, 4.0)
    assert ours["largest_loss_gap"] == pytest.approx(0.05) and te["final_loss_gap"] == 0.5
    train.compare([te, ours])
    assert ours["losses_beside"] == "TE bf16" and ours["final_loss_gap"] == 1.0


def test_fsdp_digests_change_with_every_bit() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    first = fsdp.digests(model, optimizer)
    next(iter(optimizer.state.values()))["exp_avg_sq"][0] += 2.0**-149
    second = fsdp.digests(model, optimizer)
    assert first["weights"] == second["weights"] and first["states"] != second["states"]


@pytest.mark.parametrize(
    ("steps", "statuses", "limit", "stopped", "expected"),
    [
        (2, [0, OUT_OF_MEMORY], 30, False, {"out_of_memory_at": 4}),
        (0, [OUT_OF_MEMORY, 0], 30, False, {"out_of_memory_at": 1}),
        (3, [0, 0], 30, False, {}),
        (3, [None, None], 30, False, {}),
        (1, [None, 0], 30, False, {"cut": "with steps"}),
        (0, [None, None], 30, False, {"cut": "without a step"}),
        (0, [None, None], 300, False, {"error": "no step in 300 s"}),
        (0, [1, 0], 30, False, {"error": "ranks ended with [1, 0]\nlog"}),
        (1, [-15, -15], 30, True, {"cut": "with steps"}),
    ],
)
def test_how_a_case_ended(steps, statuses, limit, stopped, expected) -> None:
    ended = Ended([{}] * steps, statuses, "log")
    found = whole.how_it_ended(ended, [1, 2, 4], limit, stopped)
    assert found == {"steps": [{}] * steps, "out_of_memory_at": None} | expected


def case(variant: str, speeds: dict[int, float], end: int | None = None) -> dict[str, Any]:
    steps = []
    for size, speed in speeds.items():
        held = {"optimizer moments": 2**31, "activations": (10 + size) * 2**30}
        steps.append({"micro_batch": size, "tokens_per_second_per_gpu": speed, "held_bytes": held})
    return {"variant": variant, "steps": steps, "out_of_memory_at": end}


def test_tables_of_whole_models() -> None:
    both = case("both", {1: 1200.0, 2: 2000.0, 4: 3000.0, 8: 2900.0})
    cases = [case("BF16", {1: 1000.0, 2: 1500.0}, 3), both, case("flow only", {}, 1)]
    assert equal(cases)[3] == "| both | 2 | 2.0 | 12.0 | 0.0 | 2 000 | 1.33 |  |"
    assert largest(cases)[3] == "| both | 8+ | 2.0 | 18.0 | 0.0 | 2 900 | 1.93 |  | 3 000 (4) |"
    assert largest(cases)[-1] == "Out of memory with micro-batch 1: flow only."


def test_kernels_are_sorted_by_what_they_are_for() -> None:
    spans = [
        (0, 10_000, "nvjet_sm90"),
        (5_000, 30_000, "ncclDevKernel_AllGather"),
        (42_000, 50_000, "_adamw_kernel"),
        (250_000, 300_000, "Memcpy DtoD"),
    ]
    found = step_trace.kinds(spans)
    assert list(found) == ["copies", "communication", "products", "optimizer"]
    assert found["communication"]["ms"] == pytest.approx(0.025)
    busy = step_trace.busy(spans)
    assert list(busy.values()) == pytest.approx([0.3, 0.088, 0.020])


def test_trajectories_measure_watched_elements() -> None:
    assert ratios(torch.tensor([2.0, -2.0]), torch.ones(2)) == {
        "moved": 2.0,
        "error": pytest.approx(5**0.5),
    }
    watched = torch.tensor([True, True, False, True])
    trained = Trained(
        torch.tensor([2.0, 0.5, 9.0, 1.0]),
        torch.ones(4),
        torch.tensor([4.0, 0.5, 9.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0, 1e-40]),  # fp32 does not hold the last one normally
    )
    found = measure(trained, Gradients(torch.zeros(1, 4), watched, stops=True))
    assert found["nearest"] == 0.5 and found["farthest"] == 2.0
    assert found["v"] == pytest.approx(1.25) and found["v_log2"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["layer", "layer-peers-7b"])
def test_expected_peaks_are_those_of_recorded_layers(name) -> None:
    measured = json.loads(result_path(f"speed/{name}").read_text())
    for result in measured["results"]:
        model = load_model_config(
            result["preset"], [f"num_layers={measured['settings']['layers']}"]
        )
        for variant in measured["settings"]["variants"]:
            run = result["runs"][variant]
            settings = CoatConfig.parse({"activation": VARIANTS[variant]}).activation
            saved = sum(saved_bytes(model, settings))
            assert run["saved_bytes_per_token"] == pytest.approx(saved, rel=0.01)
            expected = expected_peak(model, result["tokens"], settings).bytes
            assert run["peak_bytes"] == pytest.approx(expected, rel=0.005)  # 0.002 at most


def test_flops_of_an_mlp_without_a_gate() -> None:
    gated, plain = (
        flops(load_model_config("llama2-7b", [f"activation={name}"]), SEQUENCE)
        for name in ("swiglu", "squared_relu")
    )
    assert gated - plain == 6.0 * SEQUENCE * 4096 * 11008


def test_results_keep_every_digit_and_no_nan(tmp_path) -> None:
    value = {"curve": [1 / 3] * 1000, "records": [{"name": "é" * 90, "shape": [1, 2]}] * 4, "a": []}
    assert json.loads(dumps(value)) == value
    with pytest.raises(ValueError, match="a.json: not written: "):
        write_json(tmp_path / "a.json", {"rows": [{"loss": float("nan")}]})
    assert not list(tmp_path.iterdir())
