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
from launch.train.metrics import read_metrics
from tests.launch.pretrain_runs import (
    FP32_GRADIENTS,
    command,
    configuration,
    losses,
    rank_main,
)
from tests.support import run_ranks

NO_DROPOUT = ["--model-override", "hidden_dropout=0.0"]
EXACT = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # the norm is summed shard by shard
    "communication_data_type": "fp32",
    **FP32_GRADIENTS,
}
ROUNDED_TO_NEAREST = {"optimizer": {"stochastic_rounding": False}, "activation": {}}


def legs(work, folder, config, parts, *more, steps):
    """One command, started again and again: of each start (ranks, last step, further options)."""
    for world, end, *own in parts:
        stop = ["--save", folder / "save", "--load", "auto", "--stop-at-step", end, *own]
        said = run_ranks(
            world, rank_main, command(work, folder / "run", config, *more, *stop, steps=steps)
        )[0]
        assert f"finished {end} steps" in said or f"after step {end};" in said, said


@pytest.mark.slow
def test_two_ranks_then_one_then_two_are_one_run(work, tmp_path):
    """To the last bit, losses and learning rates, where sums over ranks have one order only: of two
    numbers, in fp32.

    The same command each time: a rank alone does both samples of a step.
    """
    config = configuration(tmp_path, 2, ROUNDED_TO_NEAREST, **EXACT)
    straight = tmp_path / "straight"
    assert (
        "finished 6"
        in run_ranks(2, rank_main, command(work, straight, config, *NO_DROPOUT, steps=6))[0]
    )
    legs(work, tmp_path, config, [(2, 2), (1, 3), (1, 4), (2, 6)], *NO_DROPOUT, steps=6)
    assert not (tmp_path / "save" / layout.FOLDER).exists(), (
        "the first checkpoint of a leg takes its place"
    )
    assert [(s, loss, lr) for s, loss, _, lr in losses(tmp_path / "run")] == [
        (s, loss, lr) for s, loss, _, lr in losses(straight)
    ]
    assert [r["consumed_samples"] for r in read_metrics(tmp_path / "run")] == list(range(2, 14, 2))
    parts = [read_manifest(tmp_path / "save" / f"step{n:08d}")["run"]["batch"] for n in (2, 4, 6)]
    assert [(b["micro"], b["accumulation"], b["total"]) for b in parts] == [
        (1, 1, 2),
        (1, 2, 2),
        (1, 1, 2),
    ]
    run = read_manifest(tmp_path / "save" / "step00000004")["run"]
    only_what_a_conversion_can_change(
        tmp_path / "save", {**run, "parallel": {**run["parallel"], "data": 4}}
    )


def only_what_a_conversion_can_change(save, run):
    """The leftovers of a killed conversion go; another optimizer is the user's to decide about."""
    source, there = save / "step00000004", save / layout.FOLDER / "step00000004"
    (there / "zero").mkdir(parents=True)
    p = types.SimpleNamespace(identity=lambda: run)
    assert layout.fitting(source, p) == there and (there / "manifest.json").exists()
    other = {**run, "deepspeed": {**run["deepspeed"], "optimizer": {"type": "AdamW"}}}
    p.identity = lambda: other
    assert layout.fitting(source, p) == source and not there.exists()
    with pytest.raises(CheckpointError, match=r"optimizer.type: checkpoint has 'CoatAdamW'"):
        checkpoint.examine(source, other)


@pytest.mark.slow
def test_stages_and_tensor_parallel_sizes(work, tmp_path):
    """The run goes on: losses as close as after a conversion by hand (``test_to_universal.py``)."""
    config = {
        stage: configuration(tmp_path, stage, **FP32_GRADIENTS, train_batch_size=8)
        for stage in (1, 2, 3)
    }
    wide = ["--model-override", "hidden_dropout=0.0", "hidden_size=256"]
    two = ["--tensor-parallel", "2"]
    straight = tmp_path / "straight"
    assert (
        "finished 8"
        in run_ranks(2, rank_main, command(work, straight, config[2], *wide, steps=8))[0]
    )
    for stage, *part in ((2, 2, 2), (3, 2, 4), (1, 2, 6, *two), (2, 4, 8, *two)):
        legs(work, tmp_path, config[stage], [part], *wide, steps=8)
    ours, theirs = losses(tmp_path / "run"), losses(straight)
    assert [(s, lr) for s, _, _, lr in ours] == [(s, lr) for s, _, _, lr in theirs]
    worst = max(abs(a[1] - b[1]) / b[1] for a, b in zip(ours, theirs, strict=True))
    print(f"losses differ by at most {worst:.2e}")
    assert worst < 4e-4


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
