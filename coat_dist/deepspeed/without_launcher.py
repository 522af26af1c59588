"""Starting ranks: as tasks of ``srun``, without any launcher, without a GPU, and again after a
restart by torchrun.

``srun python program.py`` starts one task a rank and sets none of the variables that launchers set.
A launcher below ``srun`` (``srun torchrun ...``) sets them, and counts. Meanings of SLURM's
variables: https://slurm.schedmd.com/srun.html (Output environment variables).
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from ..config import refuse
from ..nodes import free_port
from ..ranks import say_on_rank_0

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Ports below those that systems give to outgoing connections (32768 and above on Linux)."""
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_OTHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
    "AZUREML_EXPERIMENT_ID",
    "SM_TRAINING_ENV",
)
"""Variables from which DeepSpeed, or what it asks, learns of several ranks."""


def prepare(slurm: bool = True, alone: bool = True) -> None:
    """Let ``deepspeed.init_distributed`` work here; before torch.distributed is initialized.

    Tasks of ``srun`` become ranks. Without any launcher, DeepSpeed asks mpi4py which rank this is,
    and fails where that is not installed: this process is then made the only rank.

    Args:
        slurm: whether to look at SLURM's variables. A batch script has them, too, and is one
            process.
        alone: whether a process without any launcher becomes the only rank.
    """
    leave_out_compiled_operation()
    if store := store_of_restart():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.comm.constants import default_pg_timeout

        dist.init_process_group(
            get_accelerator().communication_backend_name(), timeout=default_pg_timeout, **store
        )
        return
    if not (slurm and take_ranks()) and alone:
        _become_only_rank()


def _become_only_rank() -> None:
    if (
        any(name in os.environ for name in (*_OF_LAUNCHERS, *_OF_OTHERS))
        or find_spec("mpi4py") is not None
    ):
        return
    values = "0", "1", "0", "127.0.0.1", str(free_port())
    os.environ.update(dict(zip(_OF_LAUNCHERS, values, strict=True)))
    say_on_rank_0(
        "note: started without a launcher, so this process is the only rank; `deepspeed "
        "PROGRAM` starts several"
    )


def store_of_restart() -> dict[str, Any]:
    """Arguments of ``torch.distributed.init_process_group`` for a rank that torchrun has started
    again; else none.

    Without ``--standalone`` and ``--rdzv-backend``, torchrun's ranks meet in one store for all
    restarts, in which the addresses of ended ranks stay (torch 2.13). On one node the number of the
    restart gives ranks names of their own.
    """
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("GROUP_WORLD_SIZE") == "1"
    )
    if not shared or number == "0":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False)
    return {
        "store": dist.PrefixStore(f"restart_{number}", store),
        "rank": rank,
        "world_size": world,
    }


def leave_out_compiled_operation() -> None:
    """Leave out, without a GPU, the operation that DeepSpeed's backend would compile for half a
    minute, and hang if an earlier compilation was killed; gloo sums instead.
    """
    import deepspeed

    if (
        deepspeed.accelerator.get_accelerator().device_name() == "cpu"
        and not torch.cuda.is_available()
    ):
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def in_a_step() -> bool:
    """Whether ``srun`` has started this process. A batch script has numbers of tasks, too, and
    is only one process.
    """
    return not {"SLURM_STEP_ID", "SLURM_STEPID"}.isdisjoint(os.environ)


def take_ranks() -> bool:
    """Set the variables that launchers set from those that ``srun`` sets; whether the ranks are
    SLURM's.

    ``MASTER_ADDR`` and ``MASTER_PORT`` that are set stay. Else they are the first host of the job
    step, and a port that follows from the numbers of job and step.

    Raises:
        CoatConfigError: this is a batch script's own process, which would wait for others; or the
            list of hosts cannot be read.
    """
    if (
        "RANK" in os.environ
        or "SLURM_PROCID" not in os.environ
        or "OMPI_COMM_WORLD_SIZE" in os.environ
    ):
        return False
    world = int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ["SLURM_NTASKS"])
    rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
    if world > 1 and not in_a_step():
        accepted = f"a program that `srun` has started (srun python), for {world} tasks"
        refuse("SLURM_STEP_ID", "not set", accepted)
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}
    counts = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2),3
    here: list[int] = []
    for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        here += [int(n)] * int(times or 1)
    if sum(here) == world and "SLURM_NODEID" in os.environ:
        ranks["LOCAL_WORLD_SIZE"] = ranks["LOCAL_SIZE"] = here[int(os.environ["SLURM_NODEID"])]
    if "MASTER_ADDR" not in os.environ:  # else SLURM's list of hosts may be missing, or of any form
        os.environ["MASTER_ADDR"] = _first_host() if world > 1 else "127.0.0.1"
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _FIRST_PORT + (int(job) + int(step) if job.isdigit() and step.isdigit() else 0) % _PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.update({name: str(value) for name, value in ranks.items()})
    return True


def _first_host() -> str:
    """The first of a list such as ``node[01-03,07],login``."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "")
    first = re.match(r"((?:[^,\[\]\s]|\[[0-9,-]+\])+)(?:,|$)", text)
    if first is None:
        given = f"not set, and the list of hosts is {text!r}"
        refuse("MASTER_ADDR", given, "the host of rank 0 (export MASTER_ADDR=...)")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[1])
