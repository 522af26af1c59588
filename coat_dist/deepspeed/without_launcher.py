"""Starting ranks without a launcher, on a machine without a GPU, or again after torchrun has restarted them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ..nodes import free_port
from .build.slurm import take_ranks

__all__ = ["leave_out_compiled_operation", "prepare", "store_of_restart"]

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")
"""Variables from which DeepSpeed, or what it asks, learns of several ranks."""


def prepare(slurm: bool = True, alone: bool = True) -> None:
    """Let ``deepspeed.init_distributed`` work here; before torch.distributed is initialized.

    Tasks of ``srun`` become ranks. Without any launcher, DeepSpeed asks mpi4py which rank this is, and fails where that
    is not installed: this process is then made the only rank.

    Args:
        slurm: whether to look at SLURM's variables. A batch script has them, too, and is one process.
        alone: whether a process without any launcher becomes the only rank.

    Raises:
        CoatConfigError: as :func:`.take_ranks`.
    """
    leave_out_compiled_operation()
    if store := store_of_restart():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.comm.constants import default_pg_timeout

        dist.init_process_group(get_accelerator().communication_backend_name(), timeout=default_pg_timeout, **store)
        return
    if not (slurm and take_ranks()) and alone:
        _become_only_rank()


def _become_only_rank() -> None:
    if any(name in os.environ for name in (*_OF_LAUNCHERS, *_OF_OTHERS)) or find_spec("mpi4py") is not None:
        return
    values = "0", "1", "0", "127.0.0.1", str(free_port())
    os.environ.update(dict(zip(_OF_LAUNCHERS, values, strict=True)))
    note = "note: started without a launcher, so this process is the only rank; `deepspeed PROGRAM` starts several"
    print(note, file=sys.stderr, flush=True)


def store_of_restart() -> dict[str, Any]:
    """Arguments of ``torch.distributed.init_process_group`` for a rank that torchrun has started again; else none.

    Without ``--standalone`` and ``--rdzv-backend``, torchrun's ranks meet in one store for all restarts, and a restart
    finds there what the ranks before have left: addresses where nobody listens any more (torch 2.13). On one node all
    ranks know the number of the restart, and so have names of their own in it.
    """
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not shared or number == "0":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False)
    return {"store": dist.PrefixStore(f"restart_{number}", store), "rank": rank, "world_size": world}


def leave_out_compiled_operation() -> None:
    """Before DeepSpeed makes its backend, which it also does where torch.distributed is initialized already.

    Without a GPU it then compiles an operation for half a minute, and hangs if an earlier compilation was killed. It is
    left out, and gloo sums.
    """
    import deepspeed

    if deepspeed.accelerator.get_accelerator().device_name() == "cpu" and not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
