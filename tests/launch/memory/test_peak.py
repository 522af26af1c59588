"""The planner against peaks that were measured on GPUs."""

import json

import pytest

from benchmarks.common import result_path
from benchmarks.speed import whole_rank
from benchmarks.speed.planner_cases import planned
from coat_dist import CoatConfig
from launch.memory.fit import GPU, need, not_torchs
from launch.memory.peak import peak_of
from launch.memory.run import Run
from launch.memory.zero import states
from launch.model.gpt import load_model_config
from tests.launch.memory.engines import kept_for_backward

MEASURED = json.loads(result_path("speed/planner-check").read_text())["results"]
MEASURED_ON_TWO = json.loads(result_path("speed/planner-check-2-ranks").read_text())["results"]


@pytest.mark.parametrize("name", MEASURED)
def test_one_gpu(name) -> None:
    one = MEASURED[name]
    run = planned(one["case"], 1)
    peak, found = peak_of(run), states(run)
    assert peak.allocated == pytest.approx(one["bytes"]["allocated"], rel=0.025)
    assert peak.reserved >= 0.98 * one["bytes"]["allocated"]
    # Measured with communicators of all groups.
    needed = need(run, GPU("", 0, one["bytes"]["other"]))
    assert needed >= one["bytes"]["allocated"] + one["bytes"]["other"]
    assert one["bytes"]["held: parameters"] == found.weights
    beside = 2 * found.elements if run.fp32_gradients_whole else 0  # in BF16
    assert one["bytes"]["held: gradients"] == found.gradients + beside
    assert one["bytes"]["held: master weights"] == found.master
    assert one["bytes"]["held: optimizer moments"] == found.moments
    assert one["bytes"]["held: activations"] == pytest.approx(kept_for_backward(run), rel=0.005)


@pytest.mark.parametrize("name", MEASURED_ON_TWO)
def test_two_gpus(name) -> None:
    """What is not torch's is less there than the planner takes, whatever it is not told."""
    one = MEASURED_ON_TWO[name]
    run = planned(one["case"], 2)
    assert peak_of(run).allocated == pytest.approx(one["bytes"]["allocated"], rel=0.025)
    assert not_torchs(run) >= one["bytes"]["other"]
    assert need(run) >= one["bytes"]["allocated"] + one["bytes"]["other"]


@pytest.mark.parametrize(
    ("result", "most", "variants"),
    [
        ("whole", 1.02, {"BF16", "both", "both, remainders"}),
        ("whole-small", 1.1, {"BF16", "both", "both, CUDA graphs"}),
        ("whole-h100", 1.1, {"BF16", "optimizer only", "flow only", "both", "both, remainders"}),
    ],
)
def test_whole_models(result, most, variants) -> None:
    """Careful by up to a tenth where reductions are the peak, which end before the next ones
    begin.
    """
    checked = set()
    for case in json.loads(result_path(f"speed/{result}").read_text())["cases"]:
        if case["variant"].startswith("TE"):
            continue
        configuration = whole_rank.settings_of(case["variant"], case["stage"])
        coat, model = (
            CoatConfig.from_deepspeed(configuration),
            load_model_config(case["model"], case["override"]),
        )
        for step in case["steps"]:
            micro = step["micro_batch"]
            run = Run(model=model, settings=configuration, coat=coat, dp=case["ranks"], micro=micro)
            assert 0.99 * step["peak_bytes"] < peak_of(run).allocated < most * step["peak_bytes"]
            assert kept_for_backward(run) == pytest.approx(
                step["held_bytes"]["activations"], rel=0.005
            )
            checked.add(case["variant"])
    assert variants <= checked
