"""Run a function on several ranks of one machine.

Gloo ranks are forked from a server process that has already imported the heavy packages, so a test
pays for process start and rendezvous only (well under a second), not for imports. NCCL ranks start
from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from coat_dist.nodes import free_port

_PRELOAD = ["tests.support.rank_server"]
_ROOT = Path(__file__).parents[2]


def _rank_main(rank: int, world: int, port: int, out: str, backend: str, fn, args) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        # By file, not by port: test processes that run side by side would race for free ports.
        dist.init_process_group(
            backend, init_method=f"file://{out}/store", rank=rank, world_size=world
        )
        result = (True, fn(rank, world, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, f"{out}/{rank}.pt")
    # Skip interpreter teardown: some libraries hang in it after a failed collective.
    os._exit(0 if result[0] else 1)


def _cpu_server() -> Any:
    """The server process. It sees no GPU, and nor do ranks forked from it: gloo ranks test the
    CPU path everywhere.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    hidden = {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
    }
    hidden["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with mock.patch.dict(os.environ, hidden):
        forkserver.ensure_running()
    return context


def start_ranks(world: int, fn, *args, out: str, backend: str = "gloo") -> list[Any]:
    """Start ``fn(rank, world, *args)`` on ``world`` ranks, whose results go to the folder
    ``out``, and do not wait.
    """
    context = _cpu_server() if backend == "gloo" else multiprocessing.get_context("spawn")
    port = free_port()
    ranks = [
        context.Process(
            target=_rank_main, args=(r, world, port, out, backend, fn, args), daemon=True
        )
        for r in range(world)
    ]
    for p in ranks:
        p.start()
    return ranks


def run_ranks(world: int, fn, *args, timeout: float = 240.0, backend: str = "gloo") -> list:
    """Call ``fn(rank, world, *args)`` on ``world`` ranks and return the results in rank order.

    ``fn`` must be importable (a module-level function) and its result must survive ``torch.save``.

    Raises:
        AssertionError: a rank failed or did not finish in ``timeout`` seconds; holds the rank's
            traceback.
    """
    with tempfile.TemporaryDirectory() as out:
        ranks = start_ranks(world, fn, *args, out=out, backend=backend)
        failed = None
        for r, p in enumerate(ranks):
            p.join(timeout if failed is None else 10)
            if p.exitcode != 0 and failed is None:
                failed = r
        for p in ranks:
            if p.is_alive():
                p.kill()
        results = []
        for r in range(world):
            path = f"{out}/{r}.pt"
            results.append(
                torch.load(path, weights_only=False)
                if os.path.exists(path)
                else (False, "no result: hung or killed")
            )
    errors = [f"rank {r}:\n{value}" for r, (ok, value) in enumerate(results) if not ok]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]
