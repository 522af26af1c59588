"""Checkpoints of pipeline stages become universal ones and Hugging Face folders, and continue at
other sizes.
"""

import shutil

import pytest
import torch

from coat_dist import convert_to_universal
from launch import convert_hf, to_universal
from launch.convert.weights import open_weights
from tests.launch.pretrain_runs import FP32_GRADIENTS, command, configuration, losses
from tests.launch.train.test_pipeline import EXPERTS, NO_NOISE, weights_after
from tests.support import run_ranks

TIED = ["--model-override", "hidden_dropout=0", "num_layers=4", "tie_embeddings=true"]
APART = ["--model-override", "hidden_dropout=0", "num_layers=4"]
TWO = ["--pipeline-parallel", "2"]
PARTS = [*TWO, "--virtual-stages", "2"]


def train(work, run, config, world, *more, steps=4):
    """Losses of a run and its weights at the end; copies of tied embeddings are compared."""
    found = {}
    for one in run_ranks(world, weights_after, command(work, run, config, *more, steps=steps)):
        found.update(one)
    if TIED[-1] in more and (copy := found.pop("output_layer.weight", None)) is not None:
        assert torch.equal(copy, found["embedding.word_embeddings.weight"])
    return losses(run), found


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def universal(load, output):
    assert (
        to_universal.main(["--load", str(load), "--output", str(output), "--log-level", "warning"])
        == 0
    )
    return output


def whole(folder, dtype=torch.float32):
    weights = open_weights(folder, dtype)
    return {name: weights.read(name).clone() for name in weights.shapes}


@pytest.fixture(scope="module")
def saved(work, tmp_path_factory):
    """Two steps of one stage, and of two interleaved ones; then two more of the one stage."""
    folder = tmp_path_factory.mktemp("saved")
    config = configuration(folder, 1, NO_NOISE)
    save = ["--save", folder / "one", "--save-interval", "2"]
    straight = train(work, folder / "straight", config, 1, *TIED, *save)
    more = [*TIED, *PARTS, "--save", folder / "two", "--stop-at-step", "2"]
    train(work, folder / "first", config, 2, *more)
    return folder, config, straight


def test_universal_files_and_weights_are_those_of_one_stage(saved):
    """Every tensor and every code: what to_universal.py writes knows nothing of stages. So do
    exported weights.
    """
    folder, _, _ = saved
    steps = [folder / name / "step00000002" for name in ("one", "two")]
    assert equal(*(whole(step) for step in steps))
    assert equal(*(whole(step, torch.bfloat16) for step in steps))
    made = [folder / f"converted{i}" for i in (0, 1)]
    numbers = [convert_to_universal(*both) for both in zip(steps, made, strict=True)]
    assert numbers[0] == numbers[1] > 20
    assert equal(whole(folder / "two"), whole(universal(folder / "two", folder / "again")))
    names = [{p.relative_to(one) for p in (one / "zero").rglob("*") if p.is_file()} for one in made]
    assert names[0] == names[1]
    for name in sorted(names[0]):
        one, two = (torch.load(folder / name, weights_only=False) for folder in made)
        if name.name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            assert torch.equal(one["param"], two["param"]) and one.keys() == two.keys(), name
        elif name.name == "codes.coat":
            assert one["layout"] == two["layout"] and len(one["ranks"]) == len(two["ranks"]) == 1
            assert equal(one["ranks"][0], two["ranks"][0]), name
    counters = torch.load(made[1] / "mp_rank_00_model_states.pt", weights_only=False)
    assert "universal_checkpoint_info" not in counters  # it would say what stage 0 holds


def test_the_hugging_face_folder_is_that_of_one_stage(saved, tmp_path):
    pytest.importorskip("safetensors")
    for name in ("one", "two"):
        source = saved[0] / name / "step00000002"
        assert (
            convert_hf.main(["--from", str(source), "--to", str(tmp_path / name), "--verify"]) == 0
        )
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")
    )
    assert (
        one["model.safetensors"] == two["model.safetensors"]
        and one["config.json"] == two["config.json"]
    )


def test_a_checkpoint_without_a_stages_files_is_refused(saved, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        saved[0] / "two" / "step00000002",
        source,
        ignore=shutil.ignore_patterns("*mp_rank_01*states.pt"),
    )
    with pytest.raises(
        ValueError,
        match="got optimizer files of 1 model- x 1 data-parallel ranks, accepted: of 2 x 1",
    ):
        convert_to_universal(source, tmp_path / "target")


def tensors(universal_checkpoint):
    """Of trained parameters, by file."""
    files = [
        p
        for p in (universal_checkpoint / "zero").rglob("*.pt")
        if p.stem in ("fp32", "exp_avg", "exp_avg_sq")
    ]
    return {
        p.relative_to(universal_checkpoint): torch.load(p, weights_only=False)["param"]
        for p in files
    }


def saved_at_once(rank, world, argv):
    """What a run saves that has loaded a checkpoint and not begun to train."""
    from launch import pretrain
    from launch.train import pretrain_options, runtime

    def interfere(loop):
        loop.save()
        loop.options.train_steps = loop.progress.step

    device = runtime.start(rank)
    return pretrain.train(
        pretrain.plan(pretrain_options.parse(argv), world), device, interfere=interfere
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "before", "after"),
    [
        (
            TIED,
            (8, [*TWO, "--tensor-parallel", "2"]),
            [(2, ["--tensor-parallel", "2"]), (4, PARTS), (1, [])],
        ),
        (
            APART,
            (4, [*PARTS]),
            [(4, ["--pipeline-parallel", "4"]), (2, ["--tensor-parallel", "2"])],
        ),
        (
            TIED,
            (4, ["--tensor-parallel", "2"]),
            [(8, [*PARTS, "--tensor-parallel", "2"]), (4, TWO)],
        ),
    ],
)
@pytest.mark.parametrize("coat", [True, False])
def test_any_layout_to_any_other(work, tmp_path, kinds, before, after, coat):
    """Every other layout of PP x TP x DP loads, and saves again, what the universal checkpoint
    holds, to the bit.

    FP8 moments are encoded again where the groups of another tensor-parallel size are not those
    that were saved.
    """
    config = configuration(tmp_path, 1, NO_NOISE if coat else None, gradient_clipping=0)
    world, first = before
    save = ["--save", tmp_path / "save", "--stop-at-step", "2"]
    train(work, tmp_path / "first", config, world, *kinds, *first, *save)
    made = universal(tmp_path / "save", tmp_path / "universal") / "step00000002"
    there = tensors(made)
    assert equal(whole(made), whole(tmp_path / "save")) and len(there) > 60
    for i, (world, more) in enumerate(after):
        load = ["--load", made, "--save", tmp_path / f"save{i}"]
        run_ranks(
            world,
            saved_at_once,
            command(work, tmp_path / f"run{i}", config, *kinds, *more, *load, steps=4),
        )
        again = tensors(
            universal(tmp_path / f"save{i}", tmp_path / f"universal{i}") / "step00000002"
        )
        assert again.keys() == there.keys()
        same_tp = ("--tensor-parallel" in first) == ("--tensor-parallel" in more)
        for name, value in there.items():
            if name.stem == "fp32" or same_tp or not coat:
                assert torch.equal(again[name], value), name
            else:
                assert torch.allclose(
                    again[name], value, rtol=0.1, atol=float(value.abs().max()) / 100
                ), name


@pytest.mark.slow
def test_fp32_sums_of_gradients(work, tmp_path):
    """BF16_Optimizer has other files; weights of two stages start one, too."""
    config = configuration(tmp_path, 1, NO_NOISE, gradient_clipping=0, **FP32_GRADIENTS)
    straight = train(work, tmp_path / "straight", config, 1, *TIED)
    train(
        work,
        tmp_path / "first",
        config,
        2,
        *TIED,
        *PARTS,
        "--save",
        tmp_path / "save",
        "--stop-at-step",
        "2",
    )
    load = ["--load", universal(tmp_path / "save", tmp_path / "universal")]
    one = train(work, tmp_path / "to1", config, 1, *TIED, *load)
    assert [r[1] for r in one[0]] == [r[1] for r in straight[0][2:]] and equal(one[1], straight[1])
    begun = [
        train(
            work,
            tmp_path / f"from{world}",
            config,
            world,
            *TIED,
            *more,
            "--init-from",
            tmp_path / "save",
            steps=1,
        )
        for world, more in ((1, []), (2, TWO))
    ]
    assert begun[0][0][0][1] == begun[1][0][0][1] < straight[0][0][1] and equal(
        begun[0][1], begun[1][1]
    )


@pytest.mark.slow
def test_experts_of_stages_and_other_zero_stages(work, tmp_path):
    """Two stages with experts go on as one stage under ZeRO-1 and 3, as one stage that never
    stopped.
    """
    config = configuration(tmp_path, 1, NO_NOISE)
    model = [*APART, *EXPERTS]
    straight = train(work, tmp_path / "straight", config, 1, *model)
    train(
        work,
        tmp_path / "first",
        config,
        2,
        *model,
        *TWO,
        "--save",
        tmp_path / "save",
        "--stop-at-step",
        "2",
    )
    made = universal(tmp_path / "save", tmp_path / "universal")
    assert equal(whole(made), whole(tmp_path / "save"))
    one = train(work, tmp_path / "to1", config, 1, *model, "--load", made)
    assert one[0] == straight[0][2:] and equal(one[1], straight[1])
    sharded = configuration(tmp_path, 3, NO_NOISE)
    run_ranks(
        1,
        weights_after,
        command(work, tmp_path / "zero3", sharded, *model, "--load", made, steps=4),
    )
    # Sums of ZeRO-3 are rounded elsewhere. The data is another one each time: up to 1.03e-4 was
    # seen.
    assert [r[1] for r in losses(tmp_path / "zero3")] == pytest.approx(
        [r[1] for r in straight[0][2:]], rel=3e-4
    )


@pytest.mark.slow
def test_auto_continues_two_interleaved_stages_as_one_and_one_as_two(work, tmp_path):
    """1 + 2 stages of 2 parts + 1 + 2 stages, a step each, are 4 steps of one stage: losses,
    norms and weights.
    """
    config = configuration(tmp_path, 1, NO_NOISE)
    straight = train(work, tmp_path / "straight", config, 1, *TIED)
    auto = [*TIED, "--save", tmp_path / "save", "--load", "auto"]
    for step, (world, more) in enumerate([(1, []), (2, PARTS), (1, []), (2, TWO)], 1):
        _, weights = train(
            work, tmp_path / "run", config, world, *auto, *more, "--stop-at-step", step
        )
    assert (
        losses(tmp_path / "run") == straight[0]
        and len(straight[0]) == 4
        and equal(weights, straight[1])
    )
