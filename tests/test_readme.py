"""README's programs as they stand there, on one and two ranks (gloo); ``tests/gpu/test_readme.py`` has GPUs."""

import os

import pytest

from tests import readme
from tests.support import run_ranks


def programs(rank, world, folder):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    return {name: readme.check(name) for name in readme.PROGRAMS}


@pytest.mark.parametrize("world", [1, 2])
def test_programs_run_as_they_stand(world, tmp_path):
    results = run_ranks(world, programs, str(tmp_path))
    assert all(len(losses) == 6 for result in results for losses in result.values())
    assert len({tuple(result["megatron"]) for result in results}) == 1, "tensor-parallel ranks have one loss"


def test_a_snippet_that_is_gone_is_missed():
    with pytest.raises(AssertionError, match="0 snippets with 'nowhere in it'"):
        readme.snippet("nowhere in it")
