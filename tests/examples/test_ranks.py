"""Each example from inside, on one and two ranks (gloo); ``tests/gpu/test_examples.py`` has GPUs."""

import os
from unittest import mock

import pytest
import torch.distributed as dist

from tests.examples.run import CHECKED, ROOT, check
from tests.support import run_ranks


def example(rank, world, name):
    os.chdir(ROOT)
    # The ranks have a process group, which they need once more when the example has ended.
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return check(name)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CHECKED)
def test_learns_with_what_it_claims(name, world):
    results = run_ranks(world, example, name)
    if name == "megatron_deepspeed":
        assert len({tuple(losses) for losses in results}) == 1, "tensor-parallel ranks have one loss"
