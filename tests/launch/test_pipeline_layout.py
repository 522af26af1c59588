"""``--load auto`` continues a run of pipeline stages at another number of them."""

import pytest
import torch

from tests.launch.pretrain_runs import configuration, losses
from tests.launch.test_pipeline import NO_NOISE
from tests.launch.test_pipeline_checkpoints import PARTS, TIED, equal, train


@pytest.mark.slow
def test_auto_continues_two_interleaved_stages_as_one_and_one_as_two(work, tmp_path):
    """1 + 2 stages of 2 parts + 1 + 2 stages, a step each, are 4 steps of one stage: losses, norms and weights."""
    config = configuration(tmp_path, 1, NO_NOISE)
    straight = train(work, tmp_path / "straight", config, 1, *TIED)
    auto = [*TIED, "--save", tmp_path / "save", "--load", "auto"]
    for step, (world, more) in enumerate([(1, []), (2, PARTS), (1, []), (2, PARTS[:2])], 1):
        _, weights = train(work, tmp_path / "run", config, world, *auto, *more, "--stop-at-step", step)
    assert losses(tmp_path / "run") == straight[0] and len(straight[0]) == 4
    assert equal(weights, straight[1]) and all(isinstance(value, torch.Tensor) for value in weights.values())
