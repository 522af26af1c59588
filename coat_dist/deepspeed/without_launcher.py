"""What DeepSpeed needs where a program was started as ``python program.py``, and on a machine without a GPU."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec

import torch

from .slurm import take_ranks

__all__ = ["leave_out_compiled_operation", "prepare"]

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")
"""Variables from which DeepSpeed, or what it asks, learns of several ranks."""


def prepare() -> None:
    """Let ``deepspeed.init_distributed`` work here; before torch.distributed is initialized.

    Tasks of ``srun`` become ranks. Without any launcher, DeepSpeed asks mpi4py which rank this is, and fails where that
    is not installed: this process is then made the only rank.

    Raises:
        CoatConfigError: SLURM's variables lack something, or contradict each other.
    """
    leave_out_compiled_operation()
    if take_ranks():
        return
    if any(name in os.environ for name in (*_OF_LAUNCHERS, *_OF_OTHERS)) or find_spec("mpi4py") is not None:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(dict(zip(_OF_LAUNCHERS, ("0", "1", "0", "127.0.0.1", str(port)), strict=True)))
    print(
        "note: started without a launcher, so this process is the only rank; `deepspeed PROGRAM` starts several",
        file=sys.stderr,
        flush=True,
    )


def leave_out_compiled_operation() -> None:
    """Before DeepSpeed makes its backend, which it also does where torch.distributed is initialized already.

    Without a GPU it then compiles an operation, half a minute of work for faster sums between processes of one host,
    and waits for ever if an earlier compilation was killed. It is left out, and gloo sums.
    """
    import deepspeed

    if not torch.cuda.is_available() and deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
