"""Variants in processes of their own, one a GPU: started, measured, and how they ended.

A program that measures variants this way calls :func:`as_rank` with its ``measure`` function before
its ``main``; ``main`` calls :func:`run` or :func:`run_variant`, which start the same program again
as ranks. A variant that fails or runs out of memory leaves the records that it wrote before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.common import ROOT, python_path
from coat_dist.nodes import free_port

OUT_OF_MEMORY = 7
"""Exit status."""
NO_MEMORY = "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc"
"""Messages of torch, CUDA, NCCL, Triton and cuBLAS; not all of them raise OutOfMemoryError."""
OF_A_LAUNCHER = "TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"
"""Variables that ranks must not inherit where a launcher started this process."""

Measure = Callable[[dict[str, Any], torch.device], Iterable[dict[str, Any]]]
"""Makes records from a case and this rank's device; each record is written at once."""


def as_rank(measure: Measure) -> None:
    """Measure and end this process, if :func:`run` started it; rank 0 writes a line of JSON for
    each record.
    """
    if sys.argv[1:2] != ["--rank"]:
        return
    case, status = json.loads(sys.argv[2]), 0
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        if memory := case.get("gpu_memory"):
            # A smaller GPU holds this process's context, too.
            free, total = torch.cuda.mem_get_info(device)
            allowed = memory * 2**30 - (total - free)
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
    try:
        for record in measure(case, device):
            if os.environ["RANK"] == "0":
                with open(sys.argv[3], "a") as file:
                    file.write(json.dumps(record) + "\n")
    except Exception as problem:
        status = 1
        if any(one in str(problem) for one in NO_MEMORY):
            status = OUT_OF_MEMORY
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if gpu and not status:
        torch.cuda.synchronize()  # this rank may still send to others
    for child in multiprocessing.active_children():  # of Megatron's checkpoints
        child.kill()
    os._exit(status)  # Python's own way out may wait for collectives of a rank that has no memory


class Ended(NamedTuple):
    """What the ranks of a case left: rank 0's records, exit statuses (see :func:`wait_for_ranks`),
    and the end of the log of the first rank that failed.
    """

    records: list[dict[str, Any]]
    statuses: list[int | None]
    log: str


def run(
    case: dict[str, Any],
    limit: float,
    program: str,
    variables: Mapping[str, str] = MappingProxyType({}),
    stopped: Callable[[], bool] = lambda: False,
) -> Ended:
    """Measure a case in ``case["ranks"]`` processes of ``program`` with these environment
    ``variables``, for at most ``limit`` seconds, or until ``stopped()``.
    """
    world = str(case["ranks"])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
    shared = {
        **clean,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": python_path(ROOT),
        **variables,
    }
    with tempfile.TemporaryDirectory() as folder:
        out, processes = Path(folder) / "records", []
        logs = [Path(folder) / f"{rank}.log" for rank in range(case["ranks"])]
        for rank, path in enumerate(logs):
            line = [sys.executable, "-m", program, "--rank", json.dumps(case), str(out)]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as log:
                processes.append(
                    subprocess.Popen(line, cwd=ROOT, env=shared | own, stdout=log, stderr=log)
                )
        statuses = wait_for_ranks(processes, limit, stopped)
        lines = out.read_text().splitlines() if out.exists() else []
        text = ""
        for path, status in zip(logs, statuses, strict=True):
            if status and not text:
                text = path.read_text(errors="replace")[-1500:]
    return Ended([json.loads(line) for line in lines], statuses, text)


def run_variant(
    case: dict[str, Any],
    limit: float,
    program: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """A variant's name and steps, and how it ended early, if it did; see :func:`run`. The case's
    "sizes" say what each step measures, in order.
    """
    steps, statuses, log = run(case, limit, program, variables)
    found: dict[str, Any] = {"variant": case["variant"], "steps": steps}
    if OUT_OF_MEMORY in statuses:
        found["out_of_memory_at"] = case["sizes"][len(steps)]
    elif any(statuses):
        found["error"] = log[-900:]
    elif None in statuses:
        found["cut_after_s"] = limit
    return found


def show_failed(variants: Iterable[Mapping[str, Any]]) -> None:
    """Print why a variant has no step."""
    for one in variants:
        if not one["steps"]:
            why = one.get("error", "out of memory, or of time").strip().splitlines()[-1]
            print(f"{one['variant']:<28} {why}", flush=True)


def wait_for_ranks(
    processes: Sequence[subprocess.Popen], limit: float, stopped: Callable[[], bool] = lambda: False
) -> list[int | None]:
    """Statuses; None of a rank that ``limit`` seconds ended, or ``stopped``. A rank that fails ends
    the others: they would wait for it. None is left behind, whatever happens.
    """
    end = time.monotonic() + limit
    statuses: list[int | None] = []
    failed = False
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < end and not stopped():
            if any(p.poll() for p in processes):
                break
            time.sleep(0.2)
        failed = any(p.poll() for p in processes) and not stopped()
    finally:
        for p in processes:
            alive = p.poll() is None
            if alive:
                p.kill()
            status = p.wait()
            if alive:
                statuses.append(0 if failed else None)
            else:
                statuses.append(status)
    return statuses
