"""Things that a test needs in this or another process: groups of one rank, a lock that somebody
else holds.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


@contextmanager
def megatron_on_one_rank() -> Iterator[None]:
    """Megatron's groups over a single rank, in this process."""
    from megatron.core import parallel_state

    from megatron_patches import initialize_model_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def saves_by_dist_checkpointing() -> Iterator[None]:
    """For a rank of a test that saves with Megatron's dist_checkpointing, which starts a process
    and leaves it behind.

    Ranks are daemons, which may have no children, and a test leaves no process.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # What it would start from nothing is forked.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    try:
        yield
    finally:
        if (queue := getattr(filesystem_async, "_results_queue", None)) is not None:
            queue._manager.shutdown()


@contextmanager
def held_elsewhere(path: Any) -> Iterator[None]:
    """Another process holds the lock of ``launch.common.lock`` on a file."""
    code = (
        "import sys; from launch.common.lock import *; from pathlib import Path\n"
        "with locked(Path(sys.argv[1])): print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        try:
            yield
        finally:
            other.communicate(b"\n")
