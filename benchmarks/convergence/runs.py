"""Training runs of `branches.py` and `long.py` in processes of their own: started, stopped,
measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from benchmarks.common import ROOT, python_path
from benchmarks.timing import median

__all__ = ["LAST", "RunFailed", "devices", "launched", "measured", "records_of", "stop", "torchrun"]

LAST = 200
"""Last steps of a run whose training losses are averaged."""


class RunFailed(Exception):
    """A run that left nothing to compare; the message holds the end of its log."""


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
) -> dict[str, Any]:
    """Run `launch/pretrain.py`, or a program around it, to the end; stopped after ``seconds``.

    Returns:
        Steps, losses and seconds of the run, by ``metrics.jsonl`` in ``out``.

    Raises:
        RunFailed: it ended early by itself, or was stopped before its first step.
    """
    start, status = time.monotonic(), None
    with launched(line, log, gpu) as process, suppress(subprocess.TimeoutExpired):
        status = process.wait(seconds)
    records = records_of(out)
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


def records_of(out: Path) -> list[dict[str, Any]]:
    """What ``metrics.jsonl`` in ``out`` has, without a line that was cut."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def devices() -> list[str]:
    """The GPUs that runs may use, as ``CUDA_VISIBLE_DEVICES`` names them; "" for a CPU."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(i) for i in range(torch.cuda.device_count())] or [""]
