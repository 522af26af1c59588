"""README's programs started by torchrun and deepspeed on one and two GPUs: no device is chosen before they run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.readme import PROGRAMS
from tests.support import free_port

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus"],
}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, launcher, world, tmp_path):
    """Each rank asserts that it reserved memory on its own GPU and on no other."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, got {torch.cuda.device_count()}")
    started = [sys.executable, *LAUNCHERS[launcher], str(world), "--master_port", str(free_port()), "--module"]
    done = subprocess.run(
        [*started, "tests.readme", name, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    losses = [json.loads((tmp_path / str(rank) / "losses.json").read_text()) for rank in range(world)]
    assert all(len(own) == 6 for own in losses)
