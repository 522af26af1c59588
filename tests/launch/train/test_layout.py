"""``--load auto`` on other ranks, ZeRO stages and tensor-parallel sizes: converted by itself,
the batch kept.
"""

import argparse
import json
import types

import pytest

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest
from launch.train import checkpoint, layout
from tests.launch.pretrain_runs import (
    command,
    configuration,
    rank_main,
)
from tests.support import run_ranks


@pytest.mark.slow
def test_fitting_converts_only_another_layout(work, tmp_path):
    """The leftovers of a killed conversion go; another optimizer is the user's to decide about."""
    config, save = configuration(tmp_path, 2), tmp_path / "save"
    argv = command(work, tmp_path / "run", config, "--save", save, steps=1)
    assert run_ranks(1, rank_main, argv)[0].startswith("finished 1")
    source, there = save / "step00000001", save / layout.FOLDER / "step00000001"
    run = read_manifest(source)["run"]
    run |= {"parallel": {**run["parallel"], "data": 4}}
    (there / "zero").mkdir(parents=True)
    p = types.SimpleNamespace(identity=lambda: run)
    assert layout.fitting(source, p) == there and (there / "manifest.json").exists()
    other = {**run, "deepspeed": {**run["deepspeed"], "optimizer": {"type": "AdamW"}}}
    p.identity = lambda: other
    assert layout.fitting(source, p) == source and not there.exists()
    with pytest.raises(CheckpointError, match=r"optimizer.type: checkpoint has \"CoatAdamW\""):
        checkpoint.examine(source, other)


def kept(tmp_path, settings, dp, saved=2, total=8, micro=2, auto=False, given=None, **options):
    """Of a checkpoint with ``total`` samples a step of ``saved`` ranks, what ``settings``
    become.
    """
    folder = tmp_path / "step00000001"
    folder.mkdir(exist_ok=True)
    manifest = {
        **{"format": 1, "files": {}, "progress": {"step": 1}},
        "run": {
            "parallel": {"data": saved},
            "batch": {"micro": micro, "total": total, "given": given},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    stages = {"pipeline_parallel": 1, "virtual_stages": 1}
    args = argparse.Namespace(**{"save": str(tmp_path), **stages, **options})
    found = layout.keep_batch(args, settings, dp, auto)
    return found and found.line, [
        settings.get(k) for k in (layout.MICRO, layout.STEPS, layout.TOTAL)
    ]


@pytest.mark.parametrize(
    ("given", "dp", "expected"),
    [
        ((2, 2, None), 1, [2, 4, 8]),
        ((2, 2, None), 8, [1, 1, 8]),
        ((2, 2, 8), 4, [2, 1, 8]),  # all three, which two ranks had
        ((3, None, None), 1, [2, 4, 8]),  # the largest up to 3 that divides 8
        ((2, None, 12), 3, [2, 2, 12]),  # another one on purpose
        ((None, None, None), 1, [2, 4, 8]),
        ((2, 4, None), 2, [2, 4, None]),  # as many ranks: a changed batch is taken as wanted
    ],
)
def test_a_step_keeps_its_samples(tmp_path, given, dp, expected):
    settings = {
        k: v
        for k, v in zip((layout.MICRO, layout.STEPS, layout.TOTAL), given, strict=True)
        if v is not None
    }
    line, values = kept(tmp_path, settings, dp)
    assert values == expected and (line is None) == (dp == 2)


@pytest.mark.parametrize(("given", "auto"), [((2, 2, None), False), ((1, 2, None), True)])
def test_a_second_start_on_as_many_ranks_keeps_them_too(tmp_path, given, auto):
    """The same command: the sizes of two ranks are still not those of one."""
    settings = {layout.MICRO: given[0], layout.STEPS: given[1]}
    line, values = kept(tmp_path, settings, 1, saved=1, given=list(given), auto=auto)
    assert values == ([1, None, 8] if auto else [2, 4, 8]) and "8 samples a step, as" in line
    changed = {layout.MICRO: 4, layout.STEPS: 1}
    assert kept(tmp_path, changed, 1, saved=1, given=list(given), auto=auto) == (
        None,
        [4, 1, None],
    ), "as wanted"


def test_interleaved_stages_get_micro_batches_that_they_can_run(tmp_path):
    interleaved = {"pipeline_parallel": 2, "virtual_stages": 2}
    assert kept(tmp_path, {layout.MICRO: 3, layout.STEPS: 2}, 1, total=6, **interleaved)[1] == [
        3,
        2,
        6,
    ]
    assert kept(tmp_path, {layout.MICRO: 2, layout.STEPS: 2}, 1, total=6, **interleaved)[1] == [
        1,
        6,
        6,
    ]
    assert kept(tmp_path, {layout.MICRO: 2, layout.STEPS: 2}, 1, total=6)[1] == [2, 3, 6]


def test_ranks_that_do_not_divide_the_samples_are_one_error(tmp_path):
    with pytest.raises(
        CoatConfigError, match=r"^train_batch_size: got 8 \(of .* with 3 data-parallel ranks"
    ):
        kept(tmp_path, {layout.MICRO: 2}, 3)
    line, values = kept(tmp_path, {layout.MICRO: 1, layout.STEPS: 4}, 4, auto=True)
    assert values == [1, None, 8] and "8 samples a step" in line
