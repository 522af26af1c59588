"""Where the time of a whole step goes, on the GPU and on the host.

    torchrun --nproc_per_node 2 -m benchmarks.speed.step [--tensor-parallel 2] [--stage 2] [--micro-batch 2]
        [--layers 8] [--variant both] [--steps 20]

The engine of `pretrain.py` with random tokens. Four looks at the same steps, each by itself, since looking costs time:
the wall clock over steps in a row; each phase alone, how long the host needs and when the GPU is done; a trace of the
GPU's kernels, by what they are for, with the pauses between them; and samples of where Python is, some 2000 a second.
Prints rank 0's tables and writes `speed/step.json`. Variants with Transformer Engine need it on ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import argument_parser, options, write_result
from benchmarks.speed.whole_rank import VARIANTS, batch_of, engine_of
from benchmarks.timing import median, union
from launch.model.gpt import load_model_config
from launch.training import build, runtime
from megatron_patches import initialize_model_parallel

__all__ = ["Sampler", "gaps", "kinds"]

KINDS = (
    ("communication", ("nccl", "barrier_kernel", "PtoP")),
    ("attention", ("sdpa", "flash", "dot_do_o", "dq_to_16bits")),
    ("products", ("nvjet", "gemm", "cutlass", "cublas", "scaled_mm")),
    ("optimizer", ("_adamw", "multi_tensor", "FusedAdam")),
    ("loss", ("_logit", "_cross_entropy", "_stats_kernel")),
    (
        "flow",
        ("_compress", "_rows_kernel", "_tensor_kernel", "_backward_kernel", "_split_rope", "_amax", "_activation"),
    ),
    ("copies", ("Memcpy", "Memset", "copy_kernel", "CatArray", "FillFunctor")),
)
"""What kernels are for, by parts of their names; the first that fits. All else is "other"."""
Span = tuple[int, int, str]
"""Nanoseconds of begin and end, and a kernel's name."""
PAUSES = (0, 10, 30, 100, 1000)
"""Microseconds from which pauses are counted together."""


def kinds(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """By what kernels are for: milliseconds, and how many."""
    found: dict[str, dict[str, float]] = {}
    for begin, end, name in spans:
        kind = next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")
        row = found.setdefault(kind, {"ms": 0.0, "count": 0})
        row["ms"] += (end - begin) / 1e6
        row["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def gaps(spans: Sequence[Span]) -> dict[str, Any]:
    """Milliseconds from the first kernel to the last, in which the GPU is busy, and its pauses: by length
    ``{"from 10 us": [count, ms]}``, by tenths of the time (their share), and the longest, with the kernels around."""
    ordered = sorted(spans)
    first, last = ordered[0][0], max(end for _, end, _ in ordered)
    reached, before = ordered[0][1], ordered[0][2]
    pauses = []
    for begin, end, name in ordered[1:]:
        if begin > reached:
            pauses.append((begin - reached, reached - first, before, name))
        if end > reached:
            reached, before = end, name
    lengths = {f"from {low} us": [0, 0.0] for low in PAUSES}
    tenths = [0.0] * 10
    for pause, at, _, _ in pauses:
        row = lengths[f"from {max(low for low in PAUSES if pause / 1e3 >= low)} us"]
        row[0] += 1
        row[1] += pause / 1e6
        tenths[min(9, 10 * at // max(1, last - first))] += 10 * pause / (last - first)
    longest = sorted(pauses, reverse=True)[:12]
    return {
        "span_ms": (last - first) / 1e6,
        "busy_ms": sum(end - begin for begin, end in union((begin, end) for begin, end, _ in spans)) / 1e6,
        "pauses": lengths,
        "share_by_tenths": [round(share, 3) for share in tenths],
        "longest": [{"us": p / 1e3, "at_ms": at / 1e6, "after": a[:80], "before": b[:80]} for p, at, a, b in longest],
    }


class Sampler:
    """Looks where Python is, from a thread, while a ``with`` block runs: lines, and functions with what they call.

    A thread that waits in a lock, a socket or autograd's engine does nothing of its own and is left out.
    """

    IDLE = {"wait", "_engine_run_backward", "select", "accept", "poll", "recvfrom", "run", "_recv"}
    QUIET = ("threading.py", "selectors.py", "heartbeat.py", "queue.py")

    def __init__(self, pause: float = 4e-4) -> None:
        self.pause, self.samples = pause, 0
        self.lines, self.functions = Counter[str](), Counter[str]()
        self._ended = threading.Event()

    def __enter__(self) -> Sampler:
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(5e-5)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def _look(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(self.pause):
            for thread, frame in sys._current_frames().items():
                code = frame.f_code
                if thread == own or code.co_name in self.IDLE or code.co_filename.endswith(self.QUIET):
                    continue
                self.samples += 1
                self.lines[f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"] += 1
                self.functions.update({f"{_short(f.f_code.co_filename)} {f.f_code.co_qualname}" for f in _stack(frame)})


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _stack(frame: Any) -> list[Any]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def phases(engine: Any, loss_of: Callable[..., Any], batch: dict[str, Any]) -> dict[str, Callable[[], Any]]:
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
    """Kernels of two steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        step()
        synchronize()
    return [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == torch.autograd.DeviceType.CUDA and e.duration_ns()
    ]


def measure(engine: Any, loss_of: Callable[..., Any], batch: dict[str, Any], count: int) -> dict[str, Any]:
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
        found["kernels"] = {k: {n: v / 2 for n, v in row.items()} for k, row in kinds(spans).items()}
        found["gpu"] = gaps(spans)
    dist.barrier()
    began = time.perf_counter()
    with Sampler() as sampler:
        for _ in range(count):
            step()
        synchronize()
    each = (time.perf_counter() - began) / count * 1e3
    scale = each / max(1, sampler.samples)
    found["sampled"] = {
        "wall_ms": each,
        "lines_ms": {name: round(n * scale, 3) for name, n in sampler.lines.most_common(40)},
        "functions_ms": {name: round(n * scale, 3) for name, n in sampler.functions.most_common(60)},
    }
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    alone = "; ".join(f"{n}: host {r['host_ms']:.1f}, done {r['done_ms']:.1f}" for n, r in found["alone"].items())
    print(f"a step {found['wall_ms']:.1f} ms; each phase alone: {alone}")
    if "gpu" in found:
        gpu = found["gpu"]
        print(f"two steps traced: {gpu['span_ms']:.1f} ms, busy {gpu['busy_ms']:.1f}; a step's kernels:")
        for kind, row in found["kernels"].items():
            print(f"  {kind:<16}{row['ms']:8.2f} ms {row['count']:7.1f}")
        print("pauses: " + ", ".join(f"{k}: {n} x {ms:.1f} ms" for k, (n, ms) in gpu["pauses"].items()))
        print("their share by tenths: " + " ".join(f"{100 * share:.0f}%" for share in gpu["share_by_tenths"]))
        for one in gpu["longest"]:
            print(f"  {one['us']:7.0f} us at {one['at_ms']:6.1f} ms: {one['after'][:50]} -> {one['before'][:50]}")
    print(f"host, sampled ({found['sampled']['wall_ms']:.1f} ms a step):")
    for what in ("lines_ms", "functions_ms"):
        for name, ms in list(found["sampled"][what].items())[:25]:
            print(f"  {ms:7.2f} ms {name}")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="llama2-7b", help="of configs/models")
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--variant", default="both", choices=[*VARIANTS])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="step", help="of the JSON result")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    device = runtime.start(int(os.environ["LOCAL_RANK"]))
    tp = arguments.tensor_parallel
    initialize_model_parallel(tp, seed=1234, create_gloo_process_groups=False)
    model = load_model_config(arguments.model, [f"num_layers={arguments.layers}", *arguments.model_override])
    engine = engine_of(model, arguments.variant, arguments.stage, tp)
    batch = batch_of(arguments.micro_batch, model)
    found = measure(engine, build.language_model_loss(tp, device), batch, arguments.steps)
    if dist.get_rank() == 0:
        show(found)
        result = {"ranks": dist.get_world_size(), "settings": options(arguments), **found}
        print("wrote", write_result(f"speed/{arguments.name}", result, arguments.output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
