"""Ranks of the program under test, forked from this process, which has imported the heavy packages for all of them."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from coat_dist.nodes import free_port

from .program import COAT, Run, rank_main

__all__ = ["Outcome", "preload", "start"]


def preload(program: str) -> None:
    """Import what the ranks need; plain DeepSpeed's never see coat_dist."""
    names = ["torch.distributed", "torch._dynamo", "torch.utils.serialization", "deepspeed"]
    names += ["deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3"]
    names += ["deepspeed.ops.op_builder.all_ops", "deepspeed.module_inject.auto_ep_layer"]
    for name in [*names, *(["coat_dist.deepspeed.engine"] if program == COAT else [])]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Outcome:
    """What became of the ranks of a run."""

    def __init__(self, folder: Path, world: int, status: list[int | None], ended: list[float]) -> None:
        self.folder, self.world = folder, world
        self.status = status
        """Exit status of each rank, minus a signal's number; None = did not end."""
        self.ended = ended
        """When each rank ended, by ``time.monotonic``, as in the reports."""
        self.reports = [self._lines(rank) for rank in range(world)]

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"{rank}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]

    def results(self, action: str) -> list[list[Any]]:
        """Of each rank what its actions of this name returned, in order."""
        return [[line["result"] for line in report if line.get("did") == action] for report in self.reports]

    def errors(self) -> list[str | None]:
        """Of each rank the first error that it met, in an action or outside."""
        found: list[str | None] = []
        for report in self.reports:
            lines = (line.get("error") or _error(line.get("result")) for line in report)
            found.append(next(filter(None, lines), None))
        return found

    def screen(self, rank: int) -> str:
        """What a rank wrote to stdout and stderr."""
        path = self.folder / f"{rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def events(self, rank: int) -> list[tuple[str, str, int]]:
        """What a rank changed on disk while armed: call, path below the folder, bytes."""
        lines = (self.folder / f"{rank}.events").read_text(encoding="utf-8").splitlines()
        return [(what, path, int(size)) for what, path, size in (line.split("\t") for line in lines)]


def _error(result: Any) -> str | None:
    return result.get("error") if isinstance(result, dict) else None


def start(run: Run, folder: Path, limit: float = 60.0, hung: int | None = None) -> Outcome:
    """Run the ranks to their end, in a fresh ``folder`` for their reports.

    Args:
        limit: seconds after which ranks that have not ended are killed.
        hung: a rank that is not waited for: it will be stopped.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, port = time.monotonic(), free_port()
    children = [_fork(run, rank, port, folder) for rank in range(run.world)]
    status: list[int | None] = [None] * run.world
    ended = [began + limit] * run.world
    while time.monotonic() - began < limit and any(s is None for r, s in enumerate(status) if r != hung):
        for rank, child in enumerate(children):
            if status[rank] is None:
                pid, code = os.waitpid(child, os.WNOHANG)
                if pid:
                    status[rank], ended[rank] = os.waitstatus_to_exitcode(code), time.monotonic()
        time.sleep(0.01)
    for rank, child in enumerate(children):
        if status[rank] is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return Outcome(folder, run.world, status, ended)


def _fork(run: Run, rank: int, port: int, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            rank_main(run, rank, port, folder)
        finally:
            os._exit(70)  # only where the report could not be written
    return child
