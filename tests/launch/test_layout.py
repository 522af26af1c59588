"""``--load auto`` on other ranks, ZeRO stages and tensor-parallel sizes: converted by itself, the batch kept."""

import argparse
import json
import shutil
import types

import pytest

import coat_dist
from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError, read_manifest
from launch.model.config import ModelConfig
from launch.train import arguments, checkpoint, layout
from launch.train.metrics import read_metrics
from launch.train.plan import assemble
from launch.train.settings import load_settings
from tests.launch.pretrain_runs import FP32_GRADIENTS, MODEL, command, configuration, losses, rank_main
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
        said = run_ranks(world, rank_main, command(work, folder / "run", config, *more, *stop, steps=steps))[0]
        assert f"finished {end} steps" in said or f"after step {end};" in said, said


@pytest.mark.slow
def test_two_ranks_then_one_then_two_are_one_run(work, tmp_path):
    """To the last bit, losses and learning rates, where sums over ranks have one order only: of two numbers, in fp32.

    The same command each time: a rank alone does both samples of a step.
    """
    config = configuration(tmp_path, 2, ROUNDED_TO_NEAREST, **EXACT)
    straight = tmp_path / "straight"
    assert "finished 6" in run_ranks(2, rank_main, command(work, straight, config, *NO_DROPOUT, steps=6))[0]
    legs(work, tmp_path, config, [(2, 2), (1, 3), (1, 4), (2, 6)], *NO_DROPOUT, steps=6)
    assert not (tmp_path / "save" / layout.FOLDER).exists(), "the first checkpoint of a leg takes its place"
    assert [(s, loss, lr) for s, loss, _, lr in losses(tmp_path / "run")] == [
        (s, loss, lr) for s, loss, _, lr in losses(straight)
    ]
    assert [r["consumed_samples"] for r in read_metrics(tmp_path / "run")] == list(range(2, 14, 2))
    parts = [read_manifest(tmp_path / "save" / f"step{n:08d}")["run"]["batch"] for n in (2, 4, 6)]
    assert [(b["micro"], b["accumulation"], b["total"]) for b in parts] == [(1, 1, 2), (1, 2, 2), (1, 1, 2)]
    # What was left of a conversion: killed on its way, whole, damaged, or of an earlier step.
    run = read_manifest(tmp_path / "save" / "step00000004")["run"]
    conversions_are_whole_or_nothing(tmp_path / "save", {**run, "parallel": {**run["parallel"], "data": 4}})


def conversions_are_whole_or_nothing(save, run):
    source, there = save / "step00000004", save / layout.FOLDER / "step00000004"
    args = argparse.Namespace(load="auto", save=str(save))
    model = ModelConfig(**MODEL).with_vocab(250)
    p = types.SimpleNamespace(args=args, model=model, settings={}, identity=lambda: run)

    class Kill(BaseException):
        pass

    real = coat_dist.convert_to_universal

    def killed(*given):
        real(*given)
        raise Kill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coat_dist, "convert_to_universal", killed)
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)  # a kill cleans nothing up
        with pytest.raises(Kill):
            layout.fitting(source, p)
    assert not list((save / layout.FOLDER).glob("step*")) and list((save / layout.FOLDER).glob(".unfinished-*"))

    with pytest.MonkeyPatch.context() as patch:
        full = types.SimpleNamespace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda folder: full)
        with pytest.raises(CheckpointError, match=r"needs about 0\.\d\d GB and .* has 0\.00 GB free"):
            layout.fitting(source, p)

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coat_dist, "convert_to_universal", lambda *given: (calls.append(given[0]), real(*given)))
        assert layout.fitting(source, p) == there and len(calls) == 1
        assert [x.name for x in (save / layout.FOLDER).glob("*step*")] == ["step00000004"]
        assert layout.fitting(source, p) == there and len(calls) == 1, "one that is whole is taken"
        moment = next(there.glob("zero/*linear_fc1.weight/exp_avg.pt"))
        moment.write_bytes(moment.read_bytes()[:-1])
        assert layout.fitting(source, p) == there and len(calls) == 2, "a damaged one is made again"
        assert layout.fitting(save / "step00000002", p).name == "step00000002" and len(calls) == 3
        assert not there.exists(), "one of another step is removed"
    same = types.SimpleNamespace(args=args, model=model, settings={}, identity=lambda: read_manifest(source)["run"])
    assert layout.fitting(source, same) == source and not there.parent.exists()
    p.settings = {"checkpoint": {"use_node_local_storage": True}}
    assert layout.fitting(source, p) == source, "no process sees the parts of all nodes"
    p.settings = {}
    # Only what a conversion mends is converted: the optimizer is the user's to decide about.
    other = {**run, "deepspeed": {**run["deepspeed"], "optimizer": {"type": "AdamW"}}}
    p.identity = lambda: other
    assert layout.fitting(source, p) == source
    with pytest.raises(CheckpointError, match=r"optimizer.type: checkpoint has 'CoatAdamW'"):
        checkpoint.examine(source, other)


@pytest.mark.slow
def test_stages_and_tensor_parallel_sizes(work, tmp_path):
    """The run goes on: losses as close as after a conversion by hand (``test_to_universal.py``)."""
    config = {stage: configuration(tmp_path, stage, **FP32_GRADIENTS, train_batch_size=8) for stage in (1, 2, 3)}
    wide = ["--model-override", "hidden_dropout=0.0", "hidden_size=256"]
    two = ["--tensor-parallel", "2"]
    straight = tmp_path / "straight"
    assert "finished 8" in run_ranks(2, rank_main, command(work, straight, config[2], *wide, steps=8))[0]
    for stage, *part in ((2, 2, 2), (3, 2, 4), (1, 2, 6, *two), (2, 4, 8, *two)):
        legs(work, tmp_path, config[stage], [part], *wide, steps=8)
    ours, theirs = losses(tmp_path / "run"), losses(straight)
    assert [(s, lr) for s, _, _, lr in ours] == [(s, lr) for s, _, _, lr in theirs]
    worst = max(abs(a[1] - b[1]) / b[1] for a, b in zip(ours, theirs, strict=True))
    print(f"losses differ by at most {worst:.2e}")
    assert worst < 4e-4


def kept(tmp_path, settings, dp, saved=2, total=8, micro=2, auto=False, given=None, **options):
    """Of a checkpoint with ``total`` samples a step of ``saved`` ranks, what ``settings`` become."""
    folder = tmp_path / "step00000001"
    folder.mkdir(exist_ok=True)
    manifest = {
        **{"format": 1, "files": {}, "progress": {"step": 1}},
        "run": {"parallel": {"data": saved}, "batch": {"micro": micro, "total": total, "given": given}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    stages = {"pipeline_parallel": 1, "virtual_stages": 1}
    args = argparse.Namespace(**{"load": "auto", "save": str(tmp_path), "micro_batch": None, **stages, **options})
    found = layout.keep_batch(args, settings, dp, auto)
    return found and found.line, [settings.get(k) for k in (layout.MICRO, layout.STEPS, layout.TOTAL)]


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
    settings = {k: v for k, v in zip((layout.MICRO, layout.STEPS, layout.TOTAL), given, strict=True) if v is not None}
    line, values = kept(tmp_path, settings, dp)
    assert values == expected and (line is None) == (dp == 2)


@pytest.mark.parametrize(("given", "auto"), [((2, 2, None), False), ((2, 2, 8), False), ((1, 2, None), True)])
def test_a_second_start_on_as_many_ranks_keeps_them_too(tmp_path, given, auto):
    """The same command: what two ranks had is still not what the one has."""
    keys = (layout.MICRO, layout.STEPS, layout.TOTAL)
    settings = {k: v for k, v in zip(keys, given, strict=True) if v is not None}
    line, values = kept(tmp_path, settings, 1, saved=1, given=list(given), auto=auto)
    assert values == ([1, None, 8] if auto else [2, 4, 8]) and "8 samples a step, as" in line
    changed = {layout.MICRO: 4, layout.STEPS: 1}
    assert kept(tmp_path, changed, 1, saved=1, given=list(given), auto=auto) == (None, [4, 1, None]), "as wanted"


def test_a_plan_is_made_twice_of_the_same_settings(work, tmp_path):
    """``finetune.py`` does, before and after it knows the number of steps."""
    kept(tmp_path, {}, 1)  # a checkpoint of two ranks
    config = configuration(tmp_path, 2)
    args = arguments.parse(command(work, tmp_path / "run", config, "--save", tmp_path, "--load", "auto"))
    settings, coat = load_settings(config, tp=1)
    known = args, 1, settings, coat, ModelConfig(**MODEL).with_vocab(250)
    one, other = assemble(*known), assemble(*known)
    assert one.kept == other.kept and one.kept.given == [2, 2, None] and one.identity() == other.identity()
    assert one.identity()["batch"] == {"micro": 2, "accumulation": 4, "total": 8, "given": [2, 2, None]}


def test_interleaved_stages_get_micro_batches_that_they_can_run(tmp_path):
    interleaved = {"pipeline_parallel": 2, "virtual_stages": 2}
    assert kept(tmp_path, {layout.MICRO: 3, layout.STEPS: 2}, 1, total=6, **interleaved)[1] == [3, 2, 6]
    assert kept(tmp_path, {layout.MICRO: 2, layout.STEPS: 2}, 1, total=6, **interleaved)[1] == [1, 6, 6]
    assert kept(tmp_path, {layout.MICRO: 2, layout.STEPS: 2}, 1, total=6)[1] == [2, 3, 6]


def test_ranks_that_do_not_divide_the_samples_are_one_error(tmp_path):
    with pytest.raises(CoatConfigError) as error:
        kept(tmp_path, {layout.MICRO: 2}, 3)
    assert str(error.value).startswith("train_batch_size: got 8 (of ") and "with 3 data-parallel ranks" in str(
        error.value
    )
    line, values = kept(tmp_path, {layout.MICRO: 1, layout.STEPS: 4}, 4, auto=True)
    assert values == [1, None, 8] and "8 samples a step" in line
    assert kept(tmp_path, {layout.MICRO: 2}, 1, load=None) == (None, [2, None, None])
