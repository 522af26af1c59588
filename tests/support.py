"""Run a function on several ranks of one machine; watch and change what a model does.

Gloo ranks are forked from a server process that has already imported the heavy packages, so a test pays for process
start and rendezvous only (well under a second), not for imports. NCCL ranks start from nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_PRELOAD = ["torch", "torch.distributed", "deepspeed", "megatron.core", "coat_dist", "megatron_patches"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


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
        dist.init_process_group(backend, init_method=f"file://{out}/store", rank=rank, world_size=world)
        result = (True, fn(rank, world, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, f"{out}/{rank}.pt")
    os._exit(0 if result[0] else 1)  # skip interpreter teardown: some libraries hang in it after a failed collective


def _cpu_server() -> Any:
    """The server process. It sees no GPU, and nor do ranks forked from it: gloo ranks test the CPU path everywhere."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, hidden):
        forkserver.ensure_running()
    return context


def start_ranks(world: int, fn, *args, out: str, backend: str = "gloo") -> list[Any]:
    """Start ``fn(rank, world, *args)`` on ``world`` ranks, whose results go to the folder ``out``, and do not wait."""
    context = _cpu_server() if backend == "gloo" else multiprocessing.get_context("spawn")
    port = free_port()
    ranks = [
        context.Process(target=_rank_main, args=(r, world, port, out, backend, fn, args), daemon=True)
        for r in range(world)
    ]
    for p in ranks:
        p.start()
    return ranks


def run_ranks(world: int, fn, *args, timeout: float = 240.0, backend: str = "gloo") -> list:
    """Call ``fn(rank, world, *args)`` on ``world`` ranks and return the results in rank order.

    ``fn`` must be importable (a module-level function) and its result must survive ``torch.save``.

    Raises:
        AssertionError: a rank failed or did not finish in ``timeout`` seconds; holds the rank's traceback.
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
                torch.load(path, weights_only=False) if os.path.exists(path) else (False, "no result: hung or killed")
            )
    errors = [f"rank {r}:\n{value}" for r, (ok, value) in enumerate(results) if not ok]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]


class Adds(TorchDispatchMode):
    """Counts, while it is active, the sums that are BF16 tensors of ``elements`` elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.count += out.dtype == torch.bfloat16 and out.numel() == self.elements
        return out


@contextmanager
def residuals_apart() -> Iterator[None]:
    """Models that are patched inside leave the residual's gradient to autograd, as ZeRO-3's hooks make all of them."""
    from megatron_patches import apply

    with mock.patch.object(apply, "_alias_residuals", lambda *_: {}):
        yield


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
def held_elsewhere(path: Any) -> Iterator[None]:
    """Another process holds the lock of ``coat_dist.checkpoint.lock`` on a file."""
    code = (
        "import sys; from coat_dist.checkpoint.lock import *; from pathlib import Path\n"
        "with locked(Path(sys.argv[1])): print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        try:
            yield
        finally:
            other.communicate(b"\n")
