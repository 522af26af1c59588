"""CoatAdamW under DeepSpeed's ZeRO: trains, shards, and resumes to the bit."""

import pytest
import torch

from tests.coat_dist.deepspeed.zero_runs import CASES, build, differences, run, snapshot
from tests.support import run_ranks


def straight_and_resumed(rank, world, settings, folder, options, build=build):
    torch.use_deterministic_algorithms(True)
    engine = build(settings, **options)
    losses = run(engine, rank, 0, 5)
    engine.save_checkpoint(folder)
    at_save = snapshot(engine)
    losses += run(engine, rank, 5, 10)
    at_end = snapshot(engine)
    frozen = engine.module.frozen.weight
    engine.destroy()

    again = build(settings, **options)
    run(again, rank, 20, 21)  # state that loading has to replace
    again.load_checkpoint(folder)
    loaded = snapshot(again)
    more = run(again, rank, 5, 10)
    return {
        "losses": losses,
        "more": more,
        "loaded": differences(at_save, loaded),
        "end": differences(at_end, snapshot(again)),
        "kinds": sorted({"fp8" if "coat_m_q" in s else "fp32" for s in loaded[0]}),
        "steps": sorted({s["step"] for s in loaded[0]}),
        "frozen": frozen.requires_grad,
    }


@pytest.mark.parametrize("case", CASES)
def test_coat_adamw_resumes_to_the_bit_under_zero(case, tmp_path):
    options = {"stochastic_rounding": case == "zero-2"}
    for rank, r in enumerate(
        run_ranks(2, straight_and_resumed, CASES[case], str(tmp_path), options)
    ):
        assert r["losses"][5:] == r["more"], rank
        assert r["loaded"] == [] and r["end"] == [], rank
        assert r["kinds"] == ["fp32", "fp8"] and r["steps"] == [5]
        assert r["losses"][-1] < 0.8 * r["losses"][0]


def refused(rank, world, folder):
    """A checkpoint of another group size does not load."""
    engine = build(CASES["zero-1"])
    run(engine, rank, 0, 1)
    engine.save_checkpoint(folder)
    other = build(CASES["zero-1"], group_size=64)
    try:
        other.load_checkpoint(folder)
    except ValueError as error:
        return str(error)


def test_load_checkpoint_refuses_another_group_size(tmp_path):
    for message in run_ranks(2, refused, str(tmp_path)):
        assert message is not None and "group_size: got 128, accepted: 64" in message
