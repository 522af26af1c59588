"""Training runs side by side on the GPUs there are: started, stopped, measured, and written down
after each of them.

`branches.py` derives its study from :class:`Study`; `long.py` starts its runs with
:func:`launched`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from statistics import fmean
from typing import Any

import psutil
import torch

from benchmarks.common import ROOT, options, python_path, result_path, write_result
from benchmarks.convergence.flow import FULL, TINY, Job, Size, check_text, tokens
from benchmarks.timing import median

__all__ = ["LAST", "RunFailed", "Study", "launched", "measured", "stop", "torchrun"]

LAST = 200
"""Last steps of a run whose training losses are averaged."""


class RunFailed(Exception):
    """A run that left nothing to compare; the message holds the end of its log."""


Wait = Callable[[subprocess.Popen, float | None], int]


def torchrun(*program: str, ranks: int = 1) -> list[str]:
    """The command of a program on ``ranks`` ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        *program,
    ]


def stop(process: subprocess.Popen) -> None:
    """Kill the launcher and all that it started: its ranks are in sessions of their own, where
    no killpg finds them.
    """
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        launcher.suspend()  # so that it starts nothing between the look and the end
        for one in (*launcher.children(recursive=True), launcher):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@contextmanager
def launched(line: Sequence[str], log: Path, gpus: str) -> Iterator[subprocess.Popen]:
    """A program that sees ``gpus`` and writes to ``log``; what still runs at the end of the
    block is killed.
    """
    environment = {
        "OMP_NUM_THREADS": "4",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": python_path(ROOT),
    }
    with open(log, "a") as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                stop(process)


def measured(
    line: Sequence[str],
    out: Path,
    log: Path,
    gpu: str,
    seconds: float | None,
    wait: Wait | None = None,
) -> dict[str, Any]:
    """Run `launch/pretrain.py`, or a program around it, to the end; stopped after ``seconds``,
    which is when ``wait`` raises TimeoutExpired.

    Returns:
        Steps, losses and seconds of the run, by ``metrics.jsonl`` in ``out``.

    Raises:
        RunFailed: it ended early by itself, or was stopped before its first step.
    """
    start, status = time.monotonic(), None
    with launched(line, log, gpu) as process, suppress(subprocess.TimeoutExpired):
        status = process.wait(seconds) if wait is None else wait(process, seconds)
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if status or not records:
        why = "stopped by --budget before its first step" if status is None else f"exit {status}"
        raise RunFailed(f"{why}, after {len(records)} steps\n{log.read_text()[-3000:]}")
    losses = [r["loss"] for r in records]
    return {
        "steps": len(records),
        "held_out_loss": records[-1].get("valid_loss"),
        "last_training_losses": fmean(losses[-LAST:]),
        "losses": [round(loss, 5) for loss in losses[:: max(1, len(losses) // 200)]],
        "seconds": time.monotonic() - start,
        "step_seconds": median([r["step_time"] for r in records]),
    }


class Study:
    """Runs that wait, those that are done and those that failed; threads take one after the other.

    A derived class says how a run is made (:meth:`train`) and what the runs say together
    (:meth:`compared`).
    """

    name: str
    """Of the result, without the end that ``--tiny`` gives it."""
    variants: Collection[str]
    """In the order in which the result has them."""
    sizes: tuple[Size, Size] = (FULL, TINY)
    """The model and batch, and those of ``--tiny``."""

    def __init__(
        self,
        todo: Sequence[Job],
        extended: dict[str, Any] | None,
        data: str,
        folder: Path,
        arguments: argparse.Namespace,
    ) -> None:
        self.data, self.folder, self.arguments = data, folder, arguments
        self.size = self.sizes[arguments.tiny]
        self.began = time.monotonic()
        self.text = tokens(data, self.size, arguments.steps)
        self.extended = extended
        if extended is not None:
            check_text(arguments.extend, extended, self.text["tokens"])
        self.runs: list[dict[str, Any]] = list(extended["runs"]) if extended else []
        self.failed: list[dict[str, Any]] = []
        self.asked, self.finished = len(todo), 0
        """Runs of this call, and those of them that came to their last step."""
        self._path = result_path(self.name + "-tiny" * arguments.tiny, arguments.output)
        self._earlier = self._path.exists()
        self._lock = threading.Lock()
        self._queue: Queue[Job] = Queue()
        for job in todo:
            self._queue.put(job)

    def train(self, job: Job, gpu: str) -> dict[str, Any]:
        """Make a run on one GPU.

        Raises:
            RunFailed: it left nothing to compare.
        """
        raise NotImplementedError

    def compared(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        """What the runs say together, for the result."""
        raise NotImplementedError

    def left(self) -> float | None:
        """Seconds of ``--budget`` that are left; None without one."""
        if self.arguments.budget is None:
            return None
        return max(0.0, self.arguments.budget - (time.monotonic() - self.began))

    def work(self, gpu: str) -> None:
        """Do runs on one GPU until none is left."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            try:
                run = self.train(job, gpu)
            except Exception as problem:  # whatever it is, the other runs go on
                text = str(problem) if isinstance(problem, RunFailed) else repr(problem)
                with self._lock:
                    self.failed.append({**job._asdict(), "why": text.splitlines()[0]})
                    print(f"{job}: {text}", flush=True)
            else:
                with self._lock:
                    self.runs.append(run)
                    self.finished += run["steps"] == self.arguments.steps
                    speed = (
                        f"{run['steps']} steps in {run['seconds']:.0f} s, "
                        f"{1e3 * run['step_seconds']:.0f} ms each"
                    )
                    print(f"{job}: {speed}, held-out loss {run['held_out_loss']}", flush=True)
            with self._lock:
                self.write()

    def work_on_all(self) -> None:
        """Do all runs, ``--per-gpu`` of them at a time on every GPU, or without one on the CPU."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            visible.split(",")
            if visible
            else [str(i) for i in range(torch.cuda.device_count())] or [""]
        )
        print(
            f"{self._queue.qsize()} runs on {len(gpus)} devices, {self.arguments.per_gpu} at a "
            "time on each; "
            f"{self.text['tokens']:,} tokens, of which a run trains on "
            f"{self.text['training_tokens']:,} ({self.text['training_epochs']:.2f} epochs) and "
            "holds out "
            f"{self.text['held_out_tokens']:,} ({self.text['held_out_epochs']:.2f} epochs)",
            flush=True,
        )
        # Slot by slot, so that the first runs spread over the GPUs.
        workers = [
            threading.Thread(target=self.work, args=(gpu,))
            for _ in range(self.arguments.per_gpu)
            for gpu in gpus
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def nothing(self) -> str | None:
        """What is to be said of a call in which no run came to its end; None of others."""
        if self.finished or not self.asked:
            return None
        return (
            f"error: none of {self.asked} runs was finished"
            + f"; {self._path} stays as it was" * self._earlier
        )

    def write(self) -> None:
        """Write the result as it is now. One of an earlier call stays until there is a run to
        compare.
        """
        if self._earlier and not self.finished:
            return
        runs = sorted(
            self.runs,
            key=lambda r: (list(self.variants).index(r["variant"]), r["seed"], r["repeat"]),
        )
        chosen = options(self.arguments, "runs")
        found = {
            "settings": chosen,
            "data": self.text,
            **self.compared(runs),
            "runs": runs,
            "failed": self.failed,
        }
        if self.extended is not None:
            kept = ("environment", "settings", "note", "extended")
            found["extended"] = {k: self.extended[k] for k in kept if k in self.extended}
        write_result(self.name + "-tiny" * self.arguments.tiny, found, self.arguments.output)
