"""Which samples a rank gets, and continuing in the middle of the data."""

from __future__ import annotations

import itertools

import pytest
import torch

from launch.data.sampler import PretrainSampler, batches
from tests.launch.tiny_data import make, train
from tests.support import equal


def positions(sampler, count):
    return list(itertools.islice(iter(sampler), count))


def test_sampler_wraps():
    assert positions(PretrainSampler(10, 0, 2, 1, 2), 4) == [[2, 3], [6, 7], [0, 1], [4, 5]]
    sampler = PretrainSampler(10, 4, 2, 0, 1)
    # Every iteration begins at consumed_samples.
    assert positions(sampler, 3) == positions(sampler, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_resume_exactly_and_leave_the_random_state_alone(tmp_path, workers):
    dataset = train(make(tmp_path / "x"), 500)
    straight = list(itertools.islice(batches(dataset, PretrainSampler(500, 0, 3, 1, 2)), 8))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rest = list(itertools.islice(batches(dataset, PretrainSampler(500, 18, 3, 1, 2), workers), 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(rest, straight[3:])
    keys = "tokens", "labels", "loss_mask", "position_ids"
    assert {k: v.shape for k, v in rest[0].items()} == dict.fromkeys(keys, (3, 32))
    assert not torch.equal(straight[0]["tokens"], straight[1]["tokens"])
