"""Memory of a long run: after its first evaluations and checkpoints nothing that a process holds grows."""

import gc
import threading

import psutil
import pytest
import torch

from tests.launch.pretrain_runs import command, configuration
from tests.support import run_ranks

EVERY = 10
"""Steps between two looks, each after an evaluation and a checkpoint."""


def held():
    """Objects, tensors and their bytes, open files and threads of this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return {
        "objects": len(gc.get_objects()),
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "files": psutil.Process().num_fds(),
        "threads": threading.active_count(),
    }


def looks(rank, world, argv, leak):
    from launch import pretrain
    from launch.train import arguments, runtime

    found, kept = [], []

    def interfere(loop):
        inner = loop._step

        def step():
            if leak:
                kept.append(torch.ones(1))
            if loop.progress.step % EVERY == 1:
                found.append(held())
            return inner()

        loop._step = step

    device = runtime.start(rank)
    pretrain.train(pretrain.plan(arguments.parse(argv), world), device, interfere=interfere)
    return found


@pytest.mark.parametrize("leak", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_grows(work, tmp_path, leak):
    """A tensor more a step is seen, so this test can fail."""
    config = configuration(tmp_path, 2)
    more = ["--save", tmp_path / "save", "--keep-last", "2", "--save-interval", EVERY]
    more += ["--eval-interval", EVERY, "--eval-steps", "2"]
    (found,) = run_ranks(1, looks, command(work, tmp_path / "run", config, *more, steps=6 * EVERY + 2), leak)
    grown = {key: found[6][key] - found[3][key] for key in found[3]}
    assert (grown.pop("objects") >= 3 * EVERY) == leak, "at least one a step"
    assert {key: more for key, more in grown.items() if more > 0} == (
        {"tensors": 3 * EVERY, "bytes": 4 * 3 * EVERY} if leak else {}
    )
