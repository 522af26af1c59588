"""One rank of one measurement, a process of its own: what a measurement leaves in memory and on a GPU ends with it.

Started by :mod:`launch.scale.crew`, with a launcher's variables for its sub-group of ranks, and ends when that ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def _end_with_parent() -> None:
    """What this reads has no end while the process that started this one is there."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Measure what the job says; rank 0 writes the result."""
    _end_with_parent()
    job: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from launch.plan.allocator import expandable_segments

    expandable_segments()  # read when torch's allocator begins

    import torch

    from launch.log_level import set_log_level
    from launch.train import runtime

    set_log_level("error")
    if job["what"] == "collectives":  # needs torch alone
        device = _join(job)
        from .bench import measure

        found = measure(device, job["sizes"])
    else:
        device = runtime.start(None, job["timeout"] / 60)
        from . import train

        found = train.measure(job, device)
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if torch.distributed.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # what libraries do at their ends takes seconds, and all is written


def _join(job: dict[str, Any]) -> Any:
    from datetime import timedelta

    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=job["timeout"]))
    if gpu:
        torch.distributed.all_reduce(torch.zeros(1, device=device))
    return device


if __name__ == "__main__":
    sys.exit(main())
