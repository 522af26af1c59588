"""Process groups and devices, quiet libraries, signals and random states of programs that train."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.deepspeed.without_launcher import store_of_restart
from launch.common.log_level import quiet_libraries


def start(local_rank: int | None, timeout_minutes: float | None = None) -> torch.device:
    """Join the other ranks and return this rank's device. Megatron's groups are not set up.

    Collectives fail after ``timeout_minutes``; None = torch's default, 10 under NCCL and 30 under
    gloo.

    Raises:
        CoatConfigError: not started by a launcher.
    """
    for name in ("RANK", "WORLD_SIZE"):
        if name not in os.environ:
            program = sys.argv[0]
            raise CoatConfigError(
                f"{name}: not set, accepted: start with `deepspeed {program} ...` or `torchrun "
                f"{program} ...`, under "
                f"SLURM also `srun python {program} ...`"
            )
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is first imported
    local = int(os.environ.get("LOCAL_RANK", local_rank if local_rank is not None else 0))
    os.environ["LOCAL_RANK"] = str(local)
    if gpu:
        # Under SLURM each task must see all GPUs of its node: --gpus-per-node.
        torch.cuda.set_device(local)
    import deepspeed

    quiet_libraries()
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if not dist.is_initialized():
        timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
        # Without `device_id`, with which NCCL would make a communicator for each of Megatron's
        # groups, used or not: several GiB of the GPU (docs/memory.md). A first collective says
        # which GPU is this rank's.
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timeout, **store_of_restart())
        if gpu:
            dist.all_reduce(torch.zeros(1, device=device))
    deepspeed.init_distributed(verbose=False)
    return device


def finish() -> None:
    """Leave the process group after every rank has come here."""
    dist.barrier()
    dist.destroy_process_group()


def seed_python_and_numpy(seed: int) -> None:
    """Seed Python's and NumPy's generators. ``initialize_model_parallel`` seeds torch's and
    Megatron's.
    """
    random.seed(seed)
    np.random.seed(seed)


def reseed(seed: int) -> None:
    """Seed every generator that training draws from; Megatron's groups exist. Pipeline stages
    differ, for dropout.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed_python_and_numpy(seed)
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


class StopSignal:
    """SIGTERM and SIGINT ask for a stop after the running step; a second one, later than its
    echoes, stops at once.

    Launchers repeat a signal that reached the whole process group, so what comes within
    ``echo_seconds`` of the first counts as the same request. The end of the launcher counts as a
    request, too.
    """

    def __init__(self, echo_seconds: float = 2.0) -> None:
        self.name: str | None = None
        """Why training should stop; None while it should not."""
        self._echo, self._first = echo_seconds, 0.0
        self._launcher = _ancestors()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.name is None:
            self.name, self._first = signal.Signals(number).name, now
            if os.environ.get("RANK", "0") == "0":
                os.write(
                    2,
                    f"{self.name}: stopping after this step; a second one stops at once\n".encode(),
                )
        elif now - self._first > self._echo:
            os._exit(128 + number)

    def requested(self) -> bool:
        """Whether this rank was asked to stop. Ranks differ for a moment: agree on it before
        acting.
        """
        if self.name is None and _ancestors() != self._launcher:
            self.name = "end of the launcher"
        return self.name is not None

    def leave(self) -> None:
        """Ignore further signals: everything is saved and the process is about to end."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _ancestors() -> list[int]:
    """Process ids of the parent, and of its parent where the parent is DeepSpeed's launcher: on one
    machine the ``deepspeed`` command forwards no signal, and leaves the launcher and the ranks
    running when it is killed.
    """
    parent = os.getppid()
    try:
        launcher = psutil.Process(parent)
        if any("deepspeed.launcher" in part for part in launcher.cmdline()):
            return [parent, launcher.ppid()]
    except psutil.Error:
        pass
    return [parent]


def mean_over_ranks(values: list[torch.Tensor | float], device: torch.device) -> list[float]:
    """Mean over all ranks of each number, summed in fp64: one collective and one host
    synchronization.
    """
    stacked = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])
    dist.all_reduce(stacked)
    return [total / dist.get_world_size() for total in stacked.tolist()]


def get_random_state() -> dict[str, Any]:
    """States of every generator that training draws from: Python, NumPy, torch on CPU and GPU,
    Megatron's tracker.
    """
    from megatron_patches import rng_state

    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue every generator from :func:`get_random_state`'s result."""
    from megatron_patches import set_rng_state

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    set_rng_state(state["torch"])
