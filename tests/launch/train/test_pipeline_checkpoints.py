"""Checkpoints of pipeline stages become universal ones and Hugging Face folders, and continue at
other sizes.
"""

import shutil

import pytest
import torch

from coat_dist import convert_to_universal
from tests.launch.convert.weight_runs import whole
from tests.launch.pretrain_runs import (
    command,
    configuration,
    make_universal,
    rank_main,
)
from tests.launch.train.test_pipeline import NO_NOISE
from tests.support import equal, run_ranks

TIED = ["--model-override", "hidden_dropout=0", "num_layers=4", "tie_embeddings=true"]
PARTS = ["--pipeline-parallel", "2", "--virtual-stages", "2"]


@pytest.fixture(scope="module")
def saved(work, tmp_path_factory):
    """Two steps of one stage, and of two interleaved ones."""
    folder = tmp_path_factory.mktemp("saved")
    config = configuration(folder, 1, NO_NOISE)
    for world, name, parts in ((1, "one", []), (2, "two", PARTS)):
        argv = [*TIED, *parts, "--save", folder / name]
        run_ranks(world, rank_main, command(work, folder / f"run {name}", config, *argv, steps=2))
    return folder


def test_universal_files_and_weights_are_those_of_one_stage(saved):
    """Every tensor and every code: what to_universal.py writes knows nothing of stages. So do
    exported weights.
    """
    steps = [saved / name / "step00000002" for name in ("one", "two")]
    assert equal(*(whole(step, torch.float32) for step in steps))
    assert equal(*map(whole, steps))
    made = [saved / f"converted{i}" for i in (0, 1)]
    numbers = [convert_to_universal(*both) for both in zip(steps, made, strict=True)]
    assert numbers[0] == numbers[1] > 20
    make_universal(saved / "two", saved / "again")
    assert equal(*(whole(saved / name, torch.float32) for name in ("two", "again")))
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


def test_a_checkpoint_without_a_stages_files_is_refused(saved, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        saved / "two" / "step00000002",
        source,
        ignore=shutil.ignore_patterns("*mp_rank_01*states.pt"),
    )
    with pytest.raises(
        ValueError,
        match="got optimizer files of 1 model- x 1 data-parallel ranks, accepted: of 2 x 1",
    ):
        convert_to_universal(source, tmp_path / "target")
