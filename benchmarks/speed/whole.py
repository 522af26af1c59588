"""Whole models: steps and memory with larger and larger micro-batches, until memory is out, for each variant.

    python -m benchmarks.speed.whole [--models llama2-7b ...] [--ranks 2] [--variants BF16 both ...] [--peers DIR]
    python -m benchmarks.speed.whole --gpu-memory 80     # as on a GPU with so many GiB

Each case (model, variant, GPUs, memory) has processes of its own, one a GPU, which build the engine of `pretrain.py`
with random tokens and train with one micro-batch after the other: two steps to warm up, three that count. A case that
the result has, measured by the same code, is not measured again; none is started after `--seconds`, so that the same
command goes on where it was. `--gpu-memory` lets torch allocate no more. Variants that begin with "TE" need `--peers`,
a folder with Transformer Engine or an archive of it. Prints tokens/s/GPU and peaks; writes `speed/whole.json`, of which
`whole_report.py` makes tables and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, argument_parser, code_digest, environment, python_path, result_path, write_result
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import ENVIRONMENT, RECIPES
from benchmarks.speed.whole_rank import OUT_OF_MEMORY, VARIANTS

MICRO_BATCHES = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24]
KEY = ("model", "override", "variant", "ranks", "stage", "gpu_memory")
"""What tells cases apart."""


def run(case: dict[str, Any], te: Path | None, limit: float) -> dict[str, Any]:
    """A case's steps, and how it ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_"))}
    shared = {
        "WORLD_SIZE": str(case["ranks"]),
        "LOCAL_WORLD_SIZE": str(case["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONPATH": python_path(ROOT),
    }
    if case["variant"] in RECIPES:
        assert te is not None  # see parse
        shared |= {**ENVIRONMENT, "PYTHONPATH": python_path(ROOT, te, te / "deps")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps"
        line = [sys.executable, "-m", "benchmarks.speed.whole_rank", json.dumps(case), str(out)]
        processes = []
        for rank in range(case["ranks"]):
            with (Path(folder) / f"{rank}.log").open("w") as log:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(line, cwd=ROOT, env={**clean, **shared, **own}, stdout=log, stderr=log)
                )
        statuses = _wait(processes, limit)
        steps = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
        left = [n for n in case["micro_batches"] if n > (steps[-1]["micro_batch"] if steps else 0)]
        if OUT_OF_MEMORY in statuses:
            return {"steps": steps, "out_of_memory_at": left[0] if left else None}
        if statuses == [0] * case["ranks"]:
            return {"steps": steps, "out_of_memory_at": None}
        logs = [(Path(folder) / f"{rank}.log").read_text()[-1500:] for rank in range(case["ranks"])]
        return {"steps": steps, "error": "time is out" if None in statuses else "\n".join(logs)}


def _wait(processes: list[subprocess.Popen], limit: float) -> list[int | None]:
    """Statuses; None of a rank that time ended. A rank that fails ends the others: they would wait for it."""
    end = time.monotonic() + limit
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() for p in processes):
            break
        time.sleep(0.2)
    failed = any(p.poll() for p in processes)
    statuses: list[int | None] = []
    for p in processes:
        alive = p.poll() is None
        if alive:
            p.kill()
        status = p.wait()
        statuses.append((0 if failed else None) if alive else status)
    return statuses


def show(one: dict[str, Any]) -> str:
    """A line about a case."""
    memory = "" if one["gpu_memory"] is None else f", {one['gpu_memory']:g} GiB"
    name = f"{one['model']}, {one['ranks']} GPUs{memory}, {one['variant']}"
    if "error" in one:
        return f"{name}: failed: {one['error'].strip().splitlines()[-1][:160]}"
    rows = [
        f"{s['micro_batch']}: {s['tokens_per_second_per_gpu']:,.0f} ({s.get('peak_bytes', 0) / 2**30:.1f})"
        for s in one["steps"]
    ]
    end = "" if one["out_of_memory_at"] is None else f"; out of memory at {one['out_of_memory_at']}"
    return f"{name}: micro-batch: tokens/s/GPU (GiB) {', '.join(rows) or 'none'}{end}"


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["llama2-7b", "llama2-13b", "llama3-8b"], help="of configs/models"
    )
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument("--variants", nargs="+", default=None, choices=[*VARIANTS], help="default: all that can run")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=MICRO_BATCHES)
    parser.add_argument("--gpu-memory", type=float, default=None, metavar="GIB", help="(default: all there is)")
    parser.add_argument("--seconds", type=float, default=540, help="start no case later than this")
    parser.add_argument("--again", action="store_true", help="measure also what the result has")
    parser.add_argument("--name", default="whole", help="of the JSON result")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    arguments = parser.parse_args(given)
    if arguments.variants is None:
        arguments.variants = [v for v in VARIANTS if arguments.peers is not None or v not in RECIPES]
    if arguments.peers is None and any(v in RECIPES for v in arguments.variants):
        parser.error("--variants: got a peer without --peers, accepted: with a folder that has Transformer Engine")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    path = result_path(f"speed/{arguments.name}", arguments.output)
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = {tuple(map(str, (one[k] for k in KEY))): one for one in known}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        te = unpack(arguments.peers, folder) if arguments.peers else None
        for model in arguments.models:
            for variant in arguments.variants:
                case = {
                    "model": model,
                    "override": arguments.model_override,
                    "variant": variant,
                    "ranks": arguments.ranks,
                    "stage": arguments.stage,
                    "gpu_memory": arguments.gpu_memory,
                }
                key = tuple(map(str, case.values()))
                have = cases.get(key, {})
                if (
                    have.get("measured", {}).get("code") == code_digest()
                    and "error" not in have
                    and not arguments.again
                ):
                    print(f"has {show(have)}")
                    continue
                left = arguments.seconds - (time.monotonic() - began)
                if left < 30:
                    print(f"not started, --seconds {arguments.seconds:g} are over: {model}, {variant}")
                    continue
                found = run(case | {"micro_batches": sorted(arguments.micro_batches)}, te, left + 30)
                now = environment()
                measured = {k: now[k] for k in ("date", "commit", "code", "gpus")}
                cases[key] = case | found | {"measured": measured}
                print(show(cases[key]), flush=True)
                write_result(f"speed/{arguments.name}", {"cases": [*cases.values()]}, arguments.output)
    print("wrote", path)


if __name__ == "__main__":
    main()
