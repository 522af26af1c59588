"""Memory of a long run: after its first evaluations and checkpoints nothing that a process holds
grows.
"""

import gc
import threading

import psutil
import torch

from tests.launch.pretrain_runs import command, configuration, run_with
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


def looks(rank, world, argv):
    found = []

    def interfere(loop):
        inner = loop._step

        def step():
            if loop.progress.step % EVERY == 1:
                found.append(held())
            return inner()

        loop._step = step

    run_with(rank, world, argv, interfere)
    return found


def test_nothing_grows(work, tmp_path):
    config = configuration(tmp_path, 2)
    more = ["--save", tmp_path / "save", "--keep-last", "2", "--save-interval", EVERY]
    more += ["--eval-interval", EVERY, "--eval-steps", "2"]
    (found,) = run_ranks(
        1, looks, command(work, tmp_path / "run", config, *more, steps=6 * EVERY + 2)
    )
    assert found[6]["objects"] - found[3]["objects"] < 3 * EVERY, "fewer than one a step"
    # What leaks grows from each look to the next.
    for key in ("tensors", "bytes", "files", "threads"):
        assert not found[3][key] < found[4][key] < found[5][key] < found[6][key], (key, found)
