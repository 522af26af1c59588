"""Each example from inside, on one and two ranks (gloo); ``tests/gpu/test_examples.py`` has
GPUs.
"""

import os
import runpy
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_patches.compat import older_than
from tests.examples.run import CHECKED, EXAMPLES, ROOT, check
from tests.support import run_ranks, saves_by_dist_checkpointing


def example(rank, world, name):
    os.chdir(ROOT)
    # The ranks have a process group, which they need once more when the example has ended.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return check(name)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", CHECKED)
def test_learns_with_what_it_claims(name, world):
    results = run_ranks(world, example, name)
    if name == "megatron_deepspeed":
        assert len({tuple(losses) for losses in results}) == 1, (
            "tensor-parallel ranks have one loss"
        )


def megatron_loop(rank, world, folder):
    program = str(EXAMPLES / "megatron_loop.py")
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [program, folder]),
        saves_by_dist_checkpointing(),
    ):
        return runpy.run_path(program, run_name="__main__")["losses"]


@pytest.mark.skipif(
    older_than("0.15"), reason="megatron-core 0.14 saves in this format with numpy 1 only"
)
@pytest.mark.slow
def test_megatrons_loop_goes_on_from_its_last_save(tmp_path):
    (whole,) = run_ranks(1, megatron_loop, str(tmp_path))
    (tmp_path / "latest").write_text("step20")
    (rest,) = run_ranks(1, megatron_loop, str(tmp_path))
    assert rest == whole[20:]
    assert (tmp_path / "latest").read_text() == "step30"


@pytest.mark.skipif(
    older_than("0.15"), reason="megatron-core 0.14 saves in this format with numpy 1 only"
)
@pytest.mark.slow
def test_megatrons_loop_goes_on_on_another_number_of_ranks(tmp_path):
    whole = run_ranks(2, megatron_loop, str(tmp_path))[0]
    (tmp_path / "latest").write_text("step20")
    (rest,) = run_ranks(1, megatron_loop, str(tmp_path))
    assert len(rest) == len(whole) - 20
    assert rest[0] < sum(whole[15:20]) / 5, (
        "weights, moments and schedule are those of the last save"
    )
