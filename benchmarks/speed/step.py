"""Where the time of a whole step goes on the GPU.

    torchrun --nproc_per_node 2 -m benchmarks.speed.step [--tensor-parallel 2] [--stage 2] \\
        [--micro-batch 2]
        [--layers 8] [--variant both] [--steps 20] [--peers DIR]

The engine of `pretrain.py` with random tokens. Two looks at the same steps, each by itself, since
looking costs time: the wall clock over steps in a row, and a trace of the GPU's kernels by what
they are for (`step_trace.py`). Prints rank 0's tables and writes `speed/step.json`. Variants that
begin with "TE" need `--peers`, a folder with Transformer Engine or an archive of it, unless it can
be imported anyway.
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

from benchmarks.arguments import argument_parser
from benchmarks.common import options, show, write_result
from benchmarks.speed.step_trace import Span, busy, kinds
from benchmarks.speed.te_layer import unpack
from benchmarks.speed.te_train import RECIPES, peer_environment
from benchmarks.speed.whole_rank import VARIANTS, engine_of
from launch.model.gpt import load_model_config
from launch.scale.timed_steps import random_batch
from launch.train import runtime, training_engine
from megatron_patches import initialize_model_parallel

TRACED = 2
"""Steps of a trace."""


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
    """Both looks of this rank."""

    def step() -> None:
        engine.backward(loss_of(engine, batch))
        engine.step()
        engine.get_global_grad_norm()

    for _ in range(6):
        step()
    synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    found: dict[str, Any] = {"wall_ms": (time.perf_counter() - began) / count * 1e3}
    if torch.cuda.is_available():
        spans = traced(step)
        found["kernels"] = kinds(spans, TRACED)
        found["gpu"] = {"steps": TRACED, **busy(spans)}
    return found


def show_tables(found: dict[str, Any]) -> None:
    """Print the times of steps and of their kernels."""
    times = {"wall_ms": found["wall_ms"], **found.get("gpu", {})}
    show("a step", times, wall_ms=".1f", span_ms=".1f", busy_ms=".1f", communication_alone_ms=".1f")
    for kind, row in found.get("kernels", {}).items():
        show(kind, row, ms=".2f", count=".1f")
        for name, one in row["top"].items():
            show(f"  {name}", one, ms=".2f", count=".1f")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__,
        model="llama2-7b",
        model_override=[],
        layers=8,
        tensor_parallel=1,
        micro_batch=2,
        steps=20,
        name="step",
        peers=None,
    )
    parser.add_argument("--variant", default="both", choices=[*VARIANTS])
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    arguments = parser.parse_args(given)
    if arguments.variant in RECIPES and arguments.peers is None and not importable():
        parser.error(
            "--variant: got a peer without --peers, accepted: with a folder that has Transformer "
            "Engine"
        )
    return arguments


def importable() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def again_with(peers: str) -> int:
    """Start this rank again where Transformer Engine can be imported; the exit status. Each rank
    unpacks an archive for itself. In this process it would be too late: Megatron has asked for it
    when it was imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | peer_environment(unpack(peers, folder))
        line = [sys.executable, "-m", "benchmarks.speed.step", *sys.argv[1:]]
        with subprocess.Popen(line, env=environment) as rank:
            # Torchrun ends this process, not that one.
            signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
            return rank.wait()


def main() -> None:
    arguments = parse()
    if arguments.variant in RECIPES:
        os.environ |= peer_environment(None, arguments.tensor_parallel)
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
        show_tables(found)
        result = {"ranks": dist.get_world_size(), "settings": options(arguments), **found}
        print("wrote", write_result(f"speed/{arguments.name}", result, arguments.output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
