"""What every benchmark shares: where results go and what identifies a run."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PATHS = "--peers", "--data", "--extend", "--plot", "--output"
"""Options whose value is a path of this machine."""


def command() -> str:
    """This run's command as one would type it: the module by name, without folders of this machine."""
    words: list[str] = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        words += [option, value] if equals and option in PATHS else [word]
    arguments, rest = [], iter(words)
    for word in rest:
        if word not in PATHS:
            arguments.append(word)
        elif next(rest, None) is not None and word != "--output":
            arguments += [word, "PATH"]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return shlex.join(["python", *(["-m", spec.name] if spec else [Path(sys.argv[0]).name]), *arguments])


def environment() -> dict[str, Any]:
    """Command, commit, versions and GPUs of this run.

    ``COAT_COMMIT`` names the commit where the code was copied to without its history.
    """
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("COAT_COMMIT") or git.stdout.strip() or None,
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


def graph_ms(calls: Sequence[Callable[[], Any]], replays: int = 20) -> float:
    """Median milliseconds of one of ``calls`` on the GPU, with nothing of the host in it: all of them, one after the
    other in a CUDA graph, after a warm-up. Calls that work on buffers of their own do not find them in the cache, if
    the buffers of all exceed it.
    """
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    marks = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return median([a.elapsed_time(b) for a, b in marks]) / len(calls)


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
