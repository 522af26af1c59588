"""Which samples a rank gets, and continuing in the middle of the data."""

from __future__ import annotations

import itertools

import pytest
import torch

from launch.data.sampler import PretrainSampler, batches
from tests.launch.tiny_data import make, train


def positions(sampler, count):
    return list(itertools.islice(iter(sampler), count))


def test_sampler_resumes_and_wraps():
    straight = positions(PretrainSampler(10, 0, 2, 1, 2), 9)
    assert straight[:4] == [[2, 3], [6, 7], [0, 1], [4, 5]]
    for n in range(9):
        assert positions(PretrainSampler(10, 4 * n, 2, 1, 2), 9 - n) == straight[n:]
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
    for a, b in zip(straight[3:], rest, strict=True):
        assert a.keys() == b.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        assert all(torch.equal(a[k], b[k]) and a[k].shape == (3, 32) for k in a)
    assert not torch.equal(straight[0]["tokens"], straight[1]["tokens"])
