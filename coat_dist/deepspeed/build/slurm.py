"""Ranks from SLURM's variables: what ``srun`` gives each task, as the variables that launchers set.

``srun python program.py`` starts one task a rank and sets none of ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
``MASTER_ADDR`` and ``MASTER_PORT``. A launcher below ``srun`` (``srun torchrun ...``) sets them, and counts.
Meanings of SLURM's variables: https://slurm.schedmd.com/srun.html (Output environment variables).
"""

from __future__ import annotations

import os
import re

from ...config import CoatConfigError, Problem

__all__ = ["in_a_step", "take_ranks"]

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Ports below those that systems give to outgoing connections (32768 and above on Linux)."""


def in_a_step() -> bool:
    """Whether ``srun`` has started this process. A batch script has numbers of tasks, too, and is only one process."""
    return not {"SLURM_STEP_ID", "SLURM_STEPID"}.isdisjoint(os.environ)


def take_ranks() -> bool:
    """Set the variables that launchers set, where ``srun`` has started this process and no launcher has set RANK.

    ``MASTER_ADDR`` and ``MASTER_PORT`` that are set stay. Else they are the first host of the job step, and a port that
    follows from the numbers of job and step.

    Returns:
        Whether the ranks are SLURM's.

    Raises:
        CoatConfigError: a variable that is missing; or this is a batch script's own process, which would wait for other
            tasks.
    """
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:
        return False
    rank, local = (_number(name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    world = _number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS")
    if world > 1 and not in_a_step():
        accepted = f"a program that `srun` has started (srun python), for {world} tasks"
        raise CoatConfigError(Problem("SLURM_STEP_ID", "not set", accepted))
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}
    counts = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as 4(x2),3
    here = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    if sum(here) == world and "SLURM_NODEID" in os.environ:
        ranks["LOCAL_WORLD_SIZE"] = ranks["LOCAL_SIZE"] = here[_number("SLURM_NODEID")]
    if "MASTER_ADDR" not in os.environ:  # else SLURM's list of hosts may be missing, or of any form
        os.environ["MASTER_ADDR"] = _first_host() if world > 1 else "127.0.0.1"
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = _FIRST_PORT + (int(job) + int(step) if job.isdigit() and step.isdigit() else 0) % _PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ.update({name: str(value) for name, value in ranks.items()})
    return True


def _number(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdigit():
        accepted = "the number that `srun` sets (srun python)"
        raise CoatConfigError(Problem(name, "not set" if text is None else f"got {text!r}", accepted))
    return int(text)


def _first_host() -> str:
    """The first of a list such as ``node[01-03,07],login``."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "")
    first = re.match(r"((?:[^,\[\]\s]|\[[0-9,-]+\])+)(?:,|$)", text)
    if first is None:
        given = f"not set, and the list of hosts is {text!r}"
        raise CoatConfigError(Problem("MASTER_ADDR", given, "the host of rank 0 (export MASTER_ADDR=...)"))
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[1])
