"""Measurements on sub-groups of the ranks that a launcher has started: each rank stays, and starts processes for them.

The launcher's processes hold no GPU and no process group. They meet in its store, through which the first tells the
others what comes next; those that a measurement needs start a process each, a sub-world with a port of its own, and
all wait for its end. So a measurement that fails (out of memory, say) fails alone, none finds what another has left,
and it works under every launcher, on one node or several. Without a launcher one process starts all ranks of a machine.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from coat_dist.nodes import free_port

__all__ = ["Crew", "Failed", "Rank"]

_JOIN = timedelta(minutes=10)
_PAUSE = 0.05
_GRACE = 5.0
"""Seconds in which the other ranks of a measurement end by themselves: theirs may be the better reason."""


class Failed(Exception):
    """A measurement has no result; says why."""


@dataclass(frozen=True)
class Rank:
    """One of those that can take part."""

    rank: int
    local: int
    host: str
    node: str
    """A host may be several nodes, to its launchers."""


class Crew:
    """This process's part: its ranks, and the way to the other processes.

    Args:
        count: ranks to start here, where no launcher has started several processes.
    """

    def __init__(self, count: int | None) -> None:
        self._store: Any = None
        self._jobs = 0
        if count is not None:
            self.first, self._members = True, [Rank(i, i, socket.gethostname(), "") for i in range(count)]
            self._mine = self._members
            return
        from torch.distributed.rendezvous import rendezvous

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.first = rank == 0
        # As init_process_group joins a launcher's ranks.
        self._store, _, _ = next(rendezvous("env://", rank, world, timeout=_JOIN))
        mine = Rank(rank, local, socket.gethostname(), _node())
        self._store.set(f"scaling/{rank}", json.dumps([local, mine.host, mine.node]))
        self._members = [Rank(i, *json.loads(self._store.get(f"scaling/{i}"))) for i in range(world)]
        self._mine = [mine]

    @property
    def members(self) -> Sequence[Rank]:
        return self._members

    def measure(self, job: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
        """Of the first process: have ``ranks`` measure; what the first of them found.

        Raises:
            Failed: one of them ended without.
        """
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            result = Path(folder) / "result.json"
            whole = {**job, "ranks": list(ranks), "port": free_port(), "result": str(result)}
            self._tell(whole)
            problem = self._take_part(whole)
            if problem is not None:
                raise Failed(problem)
            try:
                return json.loads(result.read_text(encoding="utf-8"))
            except (OSError, ValueError) as problem:
                raise Failed(f"no result: {problem}") from None

    def follow(self) -> None:
        """Of every other process: take part until the first one has no more."""
        while True:
            job = json.loads(self._wait_for(f"scaling/job/{self._jobs}"))
            if job is None:
                self._store.set(f"scaling/left/{self._mine[0].rank}", "1")
                return
            self._jobs += 1
            self._take_part(job)

    def dismiss(self) -> None:
        """Of the first process: there is no more. It may hold the store, and leaves last."""
        if self._store is None:
            return
        self._store.set(f"scaling/job/{self._jobs}", "null")
        end = time.monotonic() + 60
        for one in self._members[1:]:
            while not self._store.check([f"scaling/left/{one.rank}"]) and time.monotonic() < end:
                time.sleep(_PAUSE)

    def _tell(self, job: Mapping[str, Any]) -> None:
        if self._store is not None:
            self._store.set(f"scaling/job/{self._jobs}", json.dumps(job))
        self._jobs += 1

    def _wait_for(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(_PAUSE)
        return self._store.get(key).decode()

    def _take_part(self, job: dict[str, Any]) -> str | None:
        """Start this process's ranks, wait for those of all; why it failed, the first reason of any rank."""
        number, ranks = self._jobs - 1, job["ranks"]
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            running = {
                one.rank: _start(job, one, self._members, Path(folder) / str(one.rank))
                for one in self._mine
                if one.rank in ranks
            }
            try:
                problems = self._watch(number, running, Path(folder))
            finally:
                for process in running.values():
                    process.kill()
                    process.wait()
        if self._store is None:
            return problems[0] if problems else None
        for one in self._mine:
            self._store.set(f"scaling/{number}/{one.rank}", json.dumps(problems))
        if not self.first:
            return None
        every = [
            problem for one in self._members for problem in json.loads(self._wait_for(f"scaling/{number}/{one.rank}"))
        ]
        return _best(every)

    def _watch(self, number: int, running: dict[int, Any], folder: Path) -> list[str]:
        """Wait for the processes that were started here; why they failed, if they did or another rank's has."""
        failed, key = [], f"scaling/{number}/failed"
        ends: float | None = None
        waiting = dict(running)
        while waiting:
            for rank, process in list(waiting.items()):
                if process.poll() is None:
                    continue
                del waiting[rank]
                if process.returncode:
                    failed.append(f"rank {rank} on {socket.gethostname()}: {_reason(folder / str(rank), process)}")
            elsewhere = self._store is not None and self._store.check([key])
            if failed and self._store is not None and not elsewhere:
                self._store.set(key, "1")
            if failed or elsewhere:
                ends = ends or time.monotonic() + _GRACE
                if time.monotonic() > ends:
                    break
            time.sleep(_PAUSE)
        return [_best(failed) or ""] if failed else []


_DROPPED = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PMI_", "OMPI_", "MASTER_")


def _start(job: Mapping[str, Any], one: Rank, members: Sequence[Rank], output: Path) -> subprocess.Popen:
    """The process of one rank, in a world of the measurement's ranks alone."""
    ranks = job["ranks"]
    here = [r for r in ranks if members[r].node == one.node]
    # Every group begins with the launcher's first rank, whose address all have reached.
    address = os.environ.get("MASTER_ADDR", "127.0.0.1") if len(members) > len(here) else "127.0.0.1"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}
    environment |= {
        "RANK": str(ranks.index(one.rank)),
        "WORLD_SIZE": str(len(ranks)),
        "LOCAL_RANK": str(one.local),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(job["port"]),
        "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "launch.scale.worker", json.dumps(job)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


_ROOT = str(Path(__file__).resolve().parents[2])
_CONSEQUENCES = ("Connection", "gloo", "NCCL", "Broken pipe", "timed out", "Timed out", "no words")


def _best(problems: Sequence[str]) -> str | None:
    """The reason that is no consequence of another rank's end."""
    own = [one for one in problems if not any(word in one for word in _CONSEQUENCES)]
    return next(iter([*own, *problems]), None)


def _reason(output: Path, process: subprocess.Popen) -> str:
    """What a process that failed has said last."""
    text = ""
    with suppress(OSError):
        text = output.read_text(encoding="utf-8", errors="replace")
    if "OutOfMemoryError" in text or "out of memory" in text:
        return "out of memory"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    said = re.sub(r"^\[rank\d+\]: ", "", (errors or lines or ["no words"])[-1])
    return f"{said[:300]} (status {process.returncode})"


def _node() -> str:
    """Where this rank is: its host, and the launcher's number of the node (torchrun's, DeepSpeed's, SLURM's)."""
    number = next((os.environ[n] for n in ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID") if n in os.environ), "0")
    return f"{socket.gethostname()}/{number}"
