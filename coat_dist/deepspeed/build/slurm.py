"""Ranks from SLURM's variables: what ``srun`` tells each task, as the variables that launchers set.

``srun python program.py`` starts one task a rank and sets none of ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
``MASTER_ADDR`` and ``MASTER_PORT``. A launcher below ``srun`` (``srun torchrun ...``) sets them, and is then believed.
Meanings of SLURM's variables: https://slurm.schedmd.com/srun.html (Output environment variables).
"""

from __future__ import annotations

import os
import re
import sys

from ...config import CoatConfigError

__all__ = ["in_a_step", "take_ranks"]

_TASK = "SLURM_PROCID"
_OTHERS = ("OMPI_COMM_WORLD_SIZE",)
"""Of ``mpirun`` inside an allocation, which numbers its processes itself."""
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
        CoatConfigError: variables that are missing or contradict one another; names them, their values and what is
            accepted.
    """
    if "RANK" in os.environ or _TASK not in os.environ or any(name in os.environ for name in _OTHERS):
        return False
    world = _world()
    rank = _number(_TASK, world)
    local = _number("SLURM_LOCALID", world)
    if local > rank:
        raise CoatConfigError(f"SLURM_LOCALID: got {local} beside {_TASK} {rank}, accepted: 0 to {rank}")
    for name, value in (("WORLD_SIZE", world), ("LOCAL_RANK", local)):
        given = os.environ.get(name)
        if given is not None and given != str(value):
            raise CoatConfigError(
                f"{name}: got {given!r} without RANK, but SLURM's variables say {value}, accepted: {value}, or unset; "
                "or a launcher, which sets RANK, too"
            )
    here = _tasks_here(world)
    if here is not None and local >= here:
        raise CoatConfigError(f"SLURM_LOCALID: got {local}, accepted: below the {here} tasks of this node")
    if "MASTER_ADDR" not in os.environ:  # else SLURM's list of hosts may be missing, or of any form
        os.environ["MASTER_ADDR"] = _first_host() if world > 1 else "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", str(_port()))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local))
    if here is not None:
        os.environ.update(LOCAL_WORLD_SIZE=str(here), LOCAL_SIZE=str(here))
    if rank == 0 and world > 1 and not in_a_step():
        print(
            f"note: SLURM_STEP_ID is not set: waiting for {world} tasks; in a batch script, begin with `srun python`",
            file=sys.stderr,
            flush=True,
        )
    return True


def _world() -> int:
    """Tasks of the job step."""
    names = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NPROCS")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not given:
        raise CoatConfigError(f"SLURM_NTASKS: not set beside {_TASK}, accepted: the number of ranks (srun --ntasks)")
    for name, text in given.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            raise CoatConfigError(f"{name}: got {text!r}, accepted: a number of tasks, 1 or more")
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name}={text}" for name, text in given.items())
        raise CoatConfigError(
            f"{said}: contradict each other, accepted: a program that `srun` has started (srun python)"
        )
    return int(next(iter(given.values())))


def _number(name: str, world: int) -> int:
    text = os.environ.get(name)
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= world:
        got = "not set" if text is None else f"got {text!r}"
        raise CoatConfigError(f"{name}: {got}, accepted: 0 to {world - 1}, as srun sets it with {world} tasks")
    return int(text)


def _tasks_here(world: int) -> int | None:
    """Tasks of this node, of a list such as ``4(x2),3``; None where SLURM does not say."""
    text, node = (
        next((os.environ[n] for n in names if n in os.environ), None)
        for names in (("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), ("SLURM_NODEID",))
    )
    if text is None or node is None or not node.isdigit():
        return None
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    # That of an allocation speaks of other tasks than a smaller step has.
    return counts[int(node)] if sum(counts) == world and int(node) < len(counts) else None


def _first_host() -> str:
    """The first of a list such as ``node[01-03,07],login``."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((n for n in names if os.environ.get(n)), None)
    if name is None:
        raise CoatConfigError(
            f"MASTER_ADDR: not set, and neither is {names[1]}, accepted: the host of rank 0 (export MASTER_ADDR=...)"
        )
    text = os.environ[name]
    first = re.match(r"((?:[^,\[\]\s]|\[[0-9,-]+\])+)(?:,|$)", text)
    if first is None:
        raise CoatConfigError(f"{name}: got {text!r}, accepted: hosts such as node[01-04] (or export MASTER_ADDR=...)")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[1])


def _port() -> int:
    job, step = (os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (int(job) + int(step) if job.isdigit() and step.isdigit() else 0) % _PORTS
