"""What every benchmark shares: where results go and what identifies a run."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def environment() -> dict[str, Any]:
    """Command, commit, versions and GPUs of this run."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    module = sys.modules["__main__"].__spec__  # of `python -m`; a path would name a folder of this machine
    program = ["-m", module.name] if module else [Path(sys.argv[0]).name]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "triton", "deepspeed", "megatron-core")},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def write_result(name: str, data: dict[str, Any], folder: str | Path | None = None) -> Path:
    """Write ``{"environment": ..., **data}`` as ``NAME.json`` into ``folder`` (default: ``benchmarks/results``)."""
    path = Path(folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **data}, indent=1) + "\n", encoding="utf-8")
    return path


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
