"""Settings in which a run differs from the checkpoint that it continues from: what applies, what is refused, and how
a refused one can be gone on from."""

from __future__ import annotations

import json

import pytest

from coat_dist.checkpoint.manifest import CheckpointError
from launch.train import checkpoint
from tests.launch.pretrain_runs import command as pretrain_command
from tests.launch.pretrain_runs import configuration, losses, rank_main
from tests.launch.saved_steps import Engine, progress, start
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
            inner = inner.setdefault(block, {})
        inner[last] = value
    return run


def saved_and_examined(rank, world, folder):
    """For each change of settings: what is told, or the error; and whether ``--load auto`` converts."""
    start()
    saved = checkpoint.save(Engine(), folder, RUN, progress(1))
    manifest = json.loads((saved / "manifest.json").read_text())
    said = {}
    for changes in CHANGES:
        run = but(changes)
        try:
            found = checkpoint.examine(saved, run).changed
        except CheckpointError as problem:
            found = str(problem)
        said[json.dumps(changes)] = found, bool(checkpoint.of_another_layout(manifest, run))
    return str(saved), said


CHANGES = [
    {ROUNDING: False},
    {ROUNDING: True, "parallel.data": 4},
    {STAGE: 3},
    {STAGE: 3, KIND: "AdamW", FORMAT: "int8"},
    {FORMAT: "int8"},
    {"model.num_layers": 4, STAGE: 3},
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return run_ranks(1, saved_and_examined, str(folder))[0]


def of(told, changes):
    return told[1][json.dumps(changes)]


def test_rounding_may_change(told):
    """No stored number depends on it; another layout beside it is still converted."""
    (line,), converted = of(told, {ROUNDING: False})
    assert line == f"{ROUNDING}: checkpoint has 'auto', this run has False" and not converted
    error, converted = of(told, {ROUNDING: True, "parallel.data": 4})
    assert converted and "parallel.data: checkpoint has 2" in error and ROUNDING not in error


@pytest.mark.parametrize(
    ("changes", "converted"),
    [({STAGE: 3}, True), ({STAGE: 3, KIND: "AdamW", FORMAT: "int8"}, False), ({FORMAT: "int8"}, False)],
)
def test_a_refusal_names_the_command_that_converts(told, changes, converted):
    error, by_itself = of(told, changes)
    assert error.splitlines()[-1].startswith(f"launch/to_universal.py --load {told[0]} --output DIR converts it")
    assert by_itself == converted and all(f"{key}: checkpoint has" in error for key in changes)


def test_no_conversion_makes_another_model(told):
    error, converted = of(told, {"model.num_layers": 4, STAGE: 3})
    assert "model.num_layers: checkpoint has 2, this run has 4" in error and not converted
    assert "to_universal" not in error and "--load auto" not in error


def test_a_run_goes_on_with_another_rounding(work, tmp_path):
    """From codes rounded to nearest to noise, and back; states made without a seed get one."""
    nearest, noisy = (
        configuration(tmp_path, 2, {"optimizer": {"stochastic_rounding": how}, "activation": {"enabled": False}})
        for how in (False, True)
    )
    more = ["--save", tmp_path / "save", "--load", "auto"]
    for config, end in ((nearest, 2), (noisy, 4), (nearest, 6)):
        argv = pretrain_command(work, tmp_path / "run", config, *more, "--stop-at-step", end, steps=6)
        said = run_ranks(1, rank_main, argv)[0]
        assert f"finished {end}" in said or f"after step {end};" in said, said
    assert [step for step, *_ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
