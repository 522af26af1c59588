"""One rank of one measurement, a process of its own, started by :mod:`launch.scale.crew` through
torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from launch.common.log_level import set_log_level
from launch.scale import collective_timing, timed_steps
from launch.train import runtime
from launch.train.exhausted import is_out_of_memory


def _end_with_parent() -> None:
    while os.read(0, 1):  # has no end while the program that started the measurement is there
        pass
    os._exit(1)


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    device = runtime.start(None, job["timeout"] / 60)
    collectives = job["what"] == "collectives"
    found = (
        collective_timing.measure(device, job["sizes"])
        if collectives
        else timed_steps.measure(job, device)
    )
    torch.distributed.barrier()
    return {**found, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}


def main() -> None:
    """Measure what the job says; rank 0 writes the result, a rank that fails its reason."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]
    set_log_level("error")
    try:
        found = _measure(job)
    except Exception as problem:
        reason = (
            "out of memory" if is_out_of_memory(problem) else f"{type(problem).__name__}: {problem}"
        )
        found = {"failed": f"rank {rank}: {reason}".split("\n")[0][:300]}
    if rank == "0" or "failed" in found:
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    # What libraries do at their ends takes seconds, and all is written.
    os._exit(1 if "failed" in found else 0)


if __name__ == "__main__":
    main()
