"""Where the time of a whole step goes, on the GPU and on the host.

    torchrun --nproc_per_node 2 -m benchmarks.speed.step [--tensor-parallel 2] [--stage 2] \\
        [--micro-batch 2]
        [--layers 8] [--variant both] [--steps 20] [--peers DIR]

The engine of `pretrain.py` with random tokens. Four looks at the same steps, each by itself, since
looking costs time: the wall clock over steps in a row; each phase alone, how long the host needs
and when the GPU is done; a trace of the GPU's kernels, by what they are for, with the pauses
between them (`step_trace.py`); and samples of where Python is, some 2000 a second (`sampler.py`).
Prints rank 0's tables and writes `speed/step.json`. Variants that begin with "TE" need `--peers`, a
folder with Transformer Engine or an archive of it, unless it can be imported anyway.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import positive_int
from benchmarks.common import ROOT, argument_parser, options, python_path, write_result
from benchmarks.speed.sampler import Sampler
from benchmarks.speed.step_trace import Span, gaps, kinds
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import RECIPES, peer_environment
from benchmarks.speed.whole_rank import VARIANTS, engine_of
from benchmarks.timing import median
from launch.model.gpt import load_model_config
from launch.scale.timed_steps import random_batch
from launch.train import runtime, training_engine
from megatron_patches import initialize_model_parallel

__all__ = ["main", "measure", "parse"]

TRACED = 2
"""Steps of a trace."""


def phases(
    engine: Any, loss_of: Callable[..., Any], batch: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """The parts of a step, to be called in this order."""
    losses: list[torch.Tensor] = []
    return {
        "forward": lambda: losses.append(loss_of(engine, batch)),
        "backward": lambda: engine.backward(losses.pop()),
        "step": lambda: (engine.step(), engine.get_global_grad_norm()),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def traced(step: Callable[[], None]) -> list[Span]:
    """Kernels of :data:`TRACED` steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            step()
        synchronize()
    return [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns()
    ]


def measure(
    engine: Any, loss_of: Callable[..., Any], batch: dict[str, Any], count: int
) -> dict[str, Any]:
    """All four looks, of this rank."""
    parts = phases(engine, loss_of, batch)

    def step() -> None:
        for part in parts.values():
            part()

    for _ in range(6):
        step()
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    found: dict[str, Any] = {"wall_ms": (time.perf_counter() - began) / count * 1e3}

    alone: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for _ in range(5):
        for name, part in parts.items():
            synchronize()
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            part()
            host = time.perf_counter() - began
            synchronize()
            alone[name].append((host * 1e3, (time.perf_counter() - began) * 1e3))
    found["alone"] = {
        name: {"host_ms": median([h for h, _ in rows]), "done_ms": median([d for _, d in rows])}
        for name, rows in alone.items()
    }
    if torch.cuda.is_available():
        spans = traced(step)
        found["kernels"] = kinds(spans, TRACED)
        found["gpu"] = {"steps": TRACED, **gaps(spans)}
    dist.barrier()
    began = time.perf_counter()
    with Sampler() as sampler:
        for _ in range(count):
            step()
        synchronize()
    each = (time.perf_counter() - began) / count * 1e3
    scale = each / max(1, sampler.looks)  # not by samples: of what is idle there are none
    found["sampled"] = {
        "wall_ms": each,
        "lines_ms": {name: round(n * scale, 3) for name, n in sampler.lines.most_common(40)},
        "functions_ms": {
            name: round(n * scale, 3) for name, n in sampler.functions.most_common(60)
        },
    }
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    alone = "; ".join(
        f"{n}: host {r['host_ms']:.1f}, done {r['done_ms']:.1f}" for n, r in found["alone"].items()
    )
    print(f"a step {found['wall_ms']:.1f} ms; each phase alone: {alone}")
    if "gpu" in found:
        gpu = found["gpu"]
        print(
            f"{gpu['steps']} steps traced: {gpu['span_ms']:.1f} ms, busy {gpu['busy_ms']:.1f}, "
            "communication alone "
            f"{gpu['communication_alone_ms']:.1f}; a step's kernels:"
        )
        for kind, row in found["kernels"].items():
            print(f"  {kind:<22}{row['ms']:8.2f} ms {row['count']:7.1f}")
            for name, one in row["top"].items():
                print(f"    {one['ms']:8.2f} ms {one['count']:7.1f}  {name}")
        print(
            "pauses: "
            + ", ".join(f"{k}: {n} x {ms:.1f} ms" for k, (n, ms) in gpu["pauses"].items())
        )
        print(
            "their share by tenths: "
            + " ".join(f"{100 * share:.0f}%" for share in gpu["share_by_tenths"])
        )
        for one in gpu["longest"]:
            print(
                f"  {one['us']:7.0f} us at {one['at_ms']:6.1f} ms: {one['after'][:50]} -> "
                f"{one['before'][:50]}"
            )
    print(f"host, sampled ({found['sampled']['wall_ms']:.1f} ms a step):")
    for what in ("lines_ms", "functions_ms"):
        for name, ms in list(found["sampled"][what].items())[:25]:
            print(f"  {ms:7.2f} ms {name}")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="llama2-7b", help="of configs/models")
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=positive_int, default=8)
    parser.add_argument("--variant", default="both", choices=[*VARIANTS])
    parser.add_argument("--tensor-parallel", type=positive_int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument("--micro-batch", type=positive_int, default=2)
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--name", default="step", help="of the JSON result")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    arguments = parser.parse_args(given)
    if arguments.variant in RECIPES and arguments.peers is None and not importable():
        parser.error(
            "--variant: got a peer without --peers, accepted: with a folder that has Transformer "
            "Engine"
        )
    return arguments


def importable() -> bool:
    """Whether Transformer Engine is."""
    return importlib.util.find_spec("transformer_engine") is not None


def again_with(peers: str) -> int:
    """Start this rank again where Transformer Engine can be imported; the exit status. Each rank
    unpacks an archive for itself. In this process it would be too late: Megatron has asked for it
    when it was imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        te = unpack(peers, folder)
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT, te, te / "deps")}
        line = [sys.executable, "-m", "benchmarks.speed.step", *sys.argv[1:]]
        with subprocess.Popen(line, env=environment) as rank:
            # Torchrun ends this process, not that one.
            signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
            return rank.wait()


def main() -> None:
    arguments = parse()
    if arguments.variant in RECIPES:
        os.environ |= peer_environment(arguments.tensor_parallel)
        if not importable():
            sys.exit(again_with(arguments.peers))
    device = runtime.start(int(os.environ["LOCAL_RANK"]))
    tp = arguments.tensor_parallel
    initialize_model_parallel(tp, seed=1234, create_gloo_process_groups=False)
    model = load_model_config(
        arguments.model, [f"num_layers={arguments.layers}", *arguments.model_override]
    )
    engine = engine_of(model, arguments.variant, arguments.stage, tp)
    batch = random_batch(model, arguments.micro_batch)
    found = measure(engine, training_engine.language_model_loss(tp, device), batch, arguments.steps)
    if dist.get_rank() == 0:
        show(found)
        result = {"ranks": dist.get_world_size(), "settings": options(arguments), **found}
        print("wrote", write_result(f"speed/{arguments.name}", result, arguments.output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
