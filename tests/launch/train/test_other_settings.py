"""Settings in which a run differs from the checkpoint that it continues from: which apply, which
are converted.
"""

from __future__ import annotations

import json

import pytest

from launch.train.checkpoint import of_another_layout
from tests.launch.pretrain_runs import command, configuration, losses, rank_main
from tests.support import run_ranks

RUN = {
    "model": {"num_layers": 2},
    "parallel": {"data": 2},
    "deepspeed": {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW"},
        "coat": {"optimizer": {"stochastic_rounding": "auto", "first_moment": "e4m3"}},
    },
}
STAGE = "deepspeed.zero_optimization.stage"
KIND = "deepspeed.optimizer.type"
FORMAT = "deepspeed.coat.optimizer.first_moment"
ROUNDING = "deepspeed.coat.optimizer.stochastic_rounding"


def but(changes):
    """RUN with other values of dotted keys."""
    run = json.loads(json.dumps(RUN))
    for key, value in changes.items():
        *blocks, last = key.split(".")
        inner = run
        for block in blocks:
            inner = inner[block]
        inner[last] = value
    return run


@pytest.mark.parametrize(
    ("changes", "converted"),
    [
        ({ROUNDING: False}, []),  # no stored number depends on it
        ({ROUNDING: True, "parallel.data": 4}, ["parallel.data: checkpoint has 2, this run has 4"]),
        ({STAGE: 3}, [f"{STAGE}: checkpoint has 2, this run has 3"]),
        ({STAGE: 3, KIND: "AdamW", FORMAT: "int8"}, []),
        ({FORMAT: "int8"}, []),
        ({"model.num_layers": 4, STAGE: 3}, []),
    ],
)
def test_what_auto_converts(changes, converted):
    assert of_another_layout({"run": RUN}, but(changes)) == converted


def test_a_run_goes_on_with_another_rounding(work, tmp_path):
    """From codes rounded to nearest to noise, and back; states made without a seed get one."""
    nearest, noisy = (
        configuration(
            tmp_path,
            2,
            {"optimizer": {"stochastic_rounding": how}, "activation": {"enabled": False}},
        )
        for how in (False, True)
    )
    more = ["--save", tmp_path / "save", "--load", "auto"]
    for config, end in ((nearest, 2), (noisy, 4), (nearest, 6)):
        argv = command(work, tmp_path / "run", config, *more, "--stop-at-step", end, steps=6)
        said = run_ranks(1, rank_main, argv)[0]
        assert f"finished {end}" in said or f"after step {end};" in said, said
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
