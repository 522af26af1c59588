"""Whether a run fits a GPU, the largest micro-batch that does, and which other choices fit."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from coat_dist import CoatConfigError
from launch.common.find_config import read_config
from launch.common.log_level import say
from launch.common.settings import STEPS, TOTAL, load_settings

from .peak import peak_of
from .run import Run
from .zero import states

GIB = 2**30
MARGIN = 0.02
"""Part of what the allocator reserves that is added before a run is said to fit: pages that are
half used.
"""
_ALONE, _TOGETHER = int(2.2 * GIB), int(3.2 * GIB)
"""What a rank takes that is not torch's, where nothing better is known. 2.05 GiB were seen on each
of two H200s: the CUDA context 0.51, the first process group 0.91, building the engine 0.48, later
0.15. With several ranks a GiB more, an allowance for communicators of more groups and peers.
"""
_CONTEXT = 2**29  # bytes of this process's own CUDA context
_ACCURACY = "within 5 % of measured peaks, 10 % of a 1B model's (docs/memory.md)"

GPUS = {
    "h200": 139.8,
    "h100": 79.1,
    "h100-pcie": 79.1,
    "h100-nvl": 93.5,
    "h20": 95.0,
    "gh200": 94.5,
    "b200": 178.3,
    "a100": 79.1,
    "a100-40": 39.4,
    "l40s": 44.3,
    "rtx4090": 23.5,
}
"""GiB that the driver reports, which are less than the name says."""


class GPU(NamedTuple):
    """A GPU's memory, in bytes."""

    name: str
    memory: int
    other: int | None = None  # what is not torch's, where that is known


def chosen_gpu(args: Any) -> GPU:
    """The GPU that ``--gpu`` and ``--gpu-memory`` mean; without either the one of this machine, as
    far as other programs have left it, else an H100.
    """
    import torch

    other = args.other_memory
    if args.gpu is None and args.gpu_memory is None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = total if other is not None else min(total, free + _CONTEXT)
        return GPU(torch.cuda.get_device_name(), memory, other)
    name = (args.gpu or "h100").lower()
    if name not in GPUS:
        raise CoatConfigError(
            f"--gpu: got {args.gpu!r}, accepted: {', '.join(GPUS)} (or --gpu-memory alone)"
        )
    return GPU(name, args.gpu_memory or int(GPUS[name] * GIB), other)


def not_torchs(run: Run, gpu: GPU | None = None) -> int:
    """Bytes that a rank takes and that are not torch's; of ``gpu`` more may be known."""
    if gpu is not None and gpu.other is not None:
        return gpu.other
    return _ALONE if run.dp * run.tp == 1 else _TOGETHER


def need(run: Run, gpu: GPU | None = None) -> int:
    """Bytes of a GPU with which the rank that needs most is predicted to fit."""
    reserved = peak_of(run).reserved
    return reserved + int(MARGIN * reserved) + not_torchs(run, gpu)


def fits(run: Run, gpu: GPU) -> bool:
    """Whether the GPU's memory is enough."""
    return need(run, gpu) <= gpu.memory


def largest_micro_batch(run: Run, gpu: GPU) -> int:
    """The largest micro-batch that fits; 0 where not even one sample does."""
    sizes = range(1, 2**16)
    return bisect_left(sizes, True, key=lambda size: not fits(replace(run, micro=size), gpu))


def fewest_recomputed(run: Run, gpu: GPU) -> int | None:
    """How many of the first layers have to recompute so that the run fits; None where all of them
    are not enough.
    """
    layers = run.model.num_layers
    ways = [replace(run, recompute={"recompute_num_layers": n}) for n in range(layers + 1)]
    n = bisect_left(ways, True, key=lambda way: fits(way, gpu))
    return n if n <= layers else None


def with_largest_micro_batch(run: Run, gpu: GPU) -> Run:
    """The run with the largest micro-batch that fits and divides ``train_batch_size`` over the
    ranks, where its settings have one; accumulation follows. Where nothing fits, micro-batch 1.
    """
    total, steps = run.settings.get(TOTAL), run.settings.get(STEPS) or 1
    for micro in range(largest_micro_batch(replace(run, accumulation=steps), gpu), 0, -1):
        passes, rest = divmod(total, micro * run.dp) if total else (steps, 0)
        found = replace(run, micro=micro, accumulation=passes)
        if not rest and fits(found, gpu):
            return found
    return replace(run, micro=1, accumulation=total // run.dp if total else steps)


_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_CHOICES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("BF16, AdamW", "zero2-bf16", {}),
    ("coat", "zero2", {}),
    ("coat with 16-bit remainders", "zero2-remainder", {}),
    ("coat with states in host memory", "zero2-remainder", _OFFLOAD),
)
"""States, the file of configs/deepspeed that has them, and what is added to it."""


def choices(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with other states at every ZeRO stage, where training accepts them."""
    own = dict(run.settings.get("zero_optimization") or {})
    own.pop("offload_optimizer", None)
    for (name, file, more), stage in product(_CHOICES, (1, 2, 3) if run.dp > 1 else (run.stage,)):
        given = read_config("--deepspeed_config", file, "deepspeed")
        given["zero_optimization"] = {**own, **more, "stage": stage}
        if run.flow is not None and "coat" in given:
            given["coat"]["activation"] = run.flow.model_dump(mode="json")
        with suppress(CoatConfigError):
            settings, coat = load_settings(given, tp=run.tp)
            yield f"ZeRO-{stage}, {name}", replace(run, settings=settings, coat=coat)


def size(number: int) -> str:
    """Bytes for a reader."""
    return f"{number / GIB:.2f} GiB"


def choice_rows(run: Run, gpu: GPU) -> list[dict[str, Any]]:
    """What :func:`choices` need, the least first, and their largest micro-batches."""
    rows = []
    for name, one in choices(run):
        most = largest_micro_batch(one, gpu)
        needed = need(one, gpu)
        rows.append({"settings": name, "needed_bytes": needed, "largest_micro_batch": most})
    return sorted(rows, key=lambda row: row["needed_bytes"])


def choice_lines(rows: list[dict[str, Any]]) -> list[str]:
    """:func:`choice_rows` that fit, for a reader."""
    lines = []
    for row in rows:
        most = row["largest_micro_batch"]
        if most:
            needed = size(row["needed_bytes"])
            lines.append(f"  {needed:>11}  {row['settings']}; micro-batch up to {most}")
    return lines or ["  none"]


def table(run: Run, gpu: GPU) -> str:
    """What is held at the peak and what is added to it, a line each."""
    peak = peak_of(run)
    rows = {
        **peak.held,
        "= peak allocated by torch": peak.allocated,
        "+ allocator: pools of two streams": peak.reserved - peak.allocated,
        "+ not torch's: CUDA, NCCL, kernels": not_torchs(run, gpu),
        f"+ margin, {MARGIN:.0%}": int(MARGIN * peak.reserved),
        "= needed": need(run, gpu),
    }
    lines = [f"  {name:<38}{number / GIB:>9.2f}" for name, number in rows.items()]
    return "\n".join(["GiB of the rank that needs most", *lines, f"  the peak: {peak.moment}"])


def answer(run: Run, gpu: GPU) -> dict[str, Any]:
    """What the planner prints, as plain values; sizes in bytes."""
    peak, found = peak_of(run), states(run)
    return {
        "gpu": gpu._asdict(),
        "data_parallel": run.dp,
        "tensor_parallel": run.tp,
        "zero_stage": run.stage,
        "micro_batch": run.micro,
        "gradient_accumulation_steps": run.accumulation,
        "parameters_per_rank": found.elements,
        "host_bytes": found.hosted,
        "peak": {
            "moment": peak.moment,
            "held_bytes": peak.held,
            "allocated_bytes": peak.allocated,
            "reserved_bytes": peak.reserved,
            "needed_bytes": need(run, gpu),
        },
        "fits": fits(run, gpu),
        "largest_micro_batch": largest_micro_batch(run, gpu),
        "fewest_recomputed_layers": fewest_recomputed(run, gpu),
        "choices": choice_rows(run, gpu),
    }


def text(run: Run, gpu: GPU) -> str:
    """:func:`answer` for a reader."""
    found = answer(run, gpu)
    recomputed = found["fewest_recomputed_layers"]
    needed, host = found["peak"]["needed_bytes"], found["host_bytes"]
    return "\n".join(
        [
            "{parameters_per_rank:,} parameters a rank before ZeRO-{zero_stage}; {data_parallel} "
            "data- x {tensor_parallel} tensor-parallel ranks; micro-batch {micro_batch}, "
            "{gradient_accumulation_steps} a step".format(**found),
            table(run, gpu),
            f"{'fits' if found['fits'] else 'DOES NOT FIT'}: needs {size(needed)} of "
            f"{size(gpu.memory)} ({gpu.name}), and {size(host)} of the host; "
            f"largest micro-batch: {found['largest_micro_batch'] or 'none'}",
            "recomputed layers with which this micro-batch fits: "
            f"{'not even all' if recomputed is None else recomputed}",
            "choices that fit, and what they need with this micro-batch:",
            *choice_lines(found["choices"]),
            _ACCURACY,
        ]
    )


def dry_run(p: Any, rank: int = 0, library: Any = None) -> int:
    """Print, on rank 0, what a ``launch.train`` plan needs, without a process group, a GPU or a
    model; exit status.
    """
    gpu, run = chosen_gpu(p.args), Run.of_plan(p, library)
    if p.auto:
        run = with_largest_micro_batch(run, gpu)
    if rank == 0:
        if p.warning:
            say(p.warning, "warning")
        if p.args.json:
            print(json.dumps(answer(run, gpu), indent=2), flush=True)
        else:
            print(text(run, gpu), flush=True)
    return 0
