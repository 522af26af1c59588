"""Answers: whether a run fits a GPU, the largest micro-batch that does, and what other choices need."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from coat_dist import CoatConfig, CoatConfigError
from coat_dist.config import look_up
from coat_dist.deepspeed.config.table import with_remainders
from launch.log_level import say
from launch.train.recompute import recompute_without_flow
from launch.train.settings import STEPS, TOTAL, load_settings

from .peak import Peak, peak_of
from .run import Run
from .zero import states

__all__ = [
    "GPU",
    "choice_lines",
    "choices",
    "dry_run",
    "largest_micro_batch",
    "need",
    "size",
    "table",
    "with_block",
    "with_largest_micro_batch",
    "without_block",
]

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
_MOST = 2**20
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

    name = (args.gpu or "h100").lower()
    if name not in GPUS:
        raise CoatConfigError(
            f"--gpu: got {args.gpu!r}, accepted: {', '.join(GPUS)} (or --gpu-memory alone)"
        )
    memory = args.gpu_memory or int(GPUS[name] * GIB)
    if args.gpu is None and args.gpu_memory is None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name, memory = torch.cuda.get_device_name(), total
        if args.other_memory is None:
            memory = min(total, free + _CONTEXT)
    return GPU(name, memory, args.other_memory)


class Need(NamedTuple):
    """Bytes of one GPU that a run takes."""

    peak: Peak
    not_torchs: int
    margin: int

    @property
    def total(self) -> int:
        """Memory with which the run is predicted to fit."""
        return self.peak.reserved + self.not_torchs + self.margin


def need(run: Run, gpu: GPU | None = None) -> Need:
    """What the rank that needs most takes; on ``gpu``, of which more may be known."""
    peak, other = peak_of(run), _ALONE if run.dp * run.tp == 1 else _TOGETHER
    if gpu is not None and gpu.other is not None:
        other = gpu.other
    return Need(peak, other, int(MARGIN * peak.reserved))


def fits(run: Run, gpu: GPU) -> bool:
    """Whether the GPU's memory is enough."""
    return need(run, gpu).total <= gpu.memory


def largest_micro_batch(run: Run, gpu: GPU) -> int:
    """The largest micro-batch that fits; 0 where not even one sample does."""
    low, high = 0, 1
    while high <= _MOST and fits(run.but(micro=high), gpu):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(run.but(micro=middle), gpu) else (low, middle)
    return low


def with_largest_micro_batch(run: Run, gpu: GPU) -> Run:
    """The run with the largest micro-batch that fits and divides ``train_batch_size`` over the
    ranks, where its settings have one; accumulation follows. Where nothing fits, micro-batch 1.
    """
    total, steps = run.settings.get(TOTAL), run.settings.get(STEPS)
    micro = max(1, largest_micro_batch(run.but(accumulation=steps or 1), gpu))
    while True:
        passes, rest = divmod(total, micro * run.dp) if total else (steps or 1, 0)
        found = run.but(micro=micro, accumulation=passes)
        if micro == 1 or (not rest and fits(found, gpu)):
            return found
        micro -= 1


_STATES = (
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "zero_optimization.offload_optimizer",
    "optimizer.params.master_weights",
    "coat.optimizer.master_weights",
)
"""Keys that say where and in which dtypes states are; without them they are in fp32 on the GPU."""


def _with_optimizer(run: Run, name: str | None = None) -> dict[str, Any]:
    """A copy of the run's settings without :data:`_STATES`, and with another optimizer, which keeps
    the options that both have.
    """
    settings = copy.deepcopy(dict(run.settings))
    for key in _STATES:
        block, _, last = key.rpartition(".")
        if isinstance(inner := look_up(settings, block), dict):
            inner.pop(last, None)
    if name is not None:
        given = run.get("optimizer.params") or {}
        params = {k: given[k] for k in ("lr", "betas", "eps", "weight_decay") if k in given}
        settings["optimizer"] = {"type": name, "params": params}
    return settings


def with_block(run: Run) -> Run:
    """The run with FP8 moments and the FP8 flow, by its own block as far as it has one."""
    if run.flow is not None and run.fp8_moments:
        return run
    settings = dict(run.settings) if run.fp8_moments else _with_optimizer(run, "CoatAdamW")
    block = dict(settings.get("coat") or {})
    if run.coat is not None:
        block["activation"] = {**(block.get("activation") or {}), "enabled": True}
    return run.but(settings={**settings, "coat": block}, coat=CoatConfig.parse(block))


def without_block(run: Run) -> Run:
    """The run in plain BF16 with torch's AdamW."""
    settings = _with_optimizer(run, "AdamW")
    settings.pop("coat", None)
    recompute = recompute_without_flow(run.recompute, run.model)
    return run.but(settings=settings, coat=None, recompute=recompute)


def choices(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with other ZeRO stages and states, as far as training accepts them; with remainders
    and one pass a step, gradients are in BF16.
    """
    block = with_block(run)
    fp32 = _with_optimizer(block)
    zero = fp32["zero_optimization"]
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    hosted = with_remainders({**fp32, "zero_optimization": {**zero, **offload}})
    if run.accumulation == 1:
        hosted.pop("data_types", None)
    variants = {
        "BF16, AdamW": without_block(run),
        "coat": block.but(settings=fp32),
        "coat, bf16_remainder": block.but(settings={**hosted, "zero_optimization": zero}),
        "coat, bf16_remainder, offload_optimizer": block.but(settings=hosted),
    }
    for stage in (1, 2, 3) if run.dp > 1 else (run.stage,):
        for name, one in variants.items():
            zero = {**one.settings["zero_optimization"], "stage": stage}
            with suppress(CoatConfigError):
                settings, coat = load_settings(
                    {**one.settings, "zero_optimization": zero}, tp=run.tp
                )
                yield f"ZeRO-{stage}, {name}", one.but(settings=settings, coat=coat)


def size(number: int) -> str:
    """Bytes for a reader."""
    return f"{number / GIB:.2f} GiB" if abs(number) >= GIB / 10 else f"{number / 2**20:.1f} MiB"


def choice_rows(run: Run, gpu: GPU | None = None) -> list[dict[str, Any]]:
    """What :func:`choices` need, the least first; with a GPU also the largest micro-batches."""
    rows = [
        {
            "settings": name,
            "needed_bytes": need(one, gpu).total,
            "largest_micro_batch": gpu and largest_micro_batch(one, gpu),
        }
        for name, one in choices(run)
    ]
    return sorted(rows, key=lambda row: row["needed_bytes"])


def choice_lines(run: Run, gpu: GPU | None = None) -> list[str]:
    """:func:`choice_rows` for a reader; with a GPU those that fit."""
    lines = []
    for row in choice_rows(run, gpu):
        most = row["largest_micro_batch"]
        if most != 0:
            limit = "" if most is None else f", micro-batch up to {most}"
            lines.append(f"  {size(row['needed_bytes']):>11}  {row['settings']}{limit}")
    return lines


def table(run: Run, gpu: GPU | None = None) -> str:
    """What is held at the peak and what is added to it, a line each."""
    needed = need(run, gpu)
    peak = needed.peak
    rows = {
        **peak.held,
        "= peak allocated by torch": peak.allocated,
        "+ allocator: pools of two streams": peak.reserved - peak.allocated,
        "+ not torch's: CUDA, NCCL, kernels": needed.not_torchs,
        f"+ margin, {MARGIN:.0%}": needed.margin,
        "= needed": needed.total,
    }
    lines = [f"{'memory of the rank that needs most':<40}{'GiB':>9}"]
    lines += [f"  {name:<38}{number / GIB:>9.2f}" for name, number in rows.items()]
    return "\n".join([*lines, f"  the peak: {peak.moment}"])


def answer(run: Run, gpu: GPU) -> dict[str, Any]:
    """What the planner prints, as plain values; sizes in bytes."""
    needed, found = need(run, gpu), states(run)
    return {
        "gpu": {"name": gpu.name, "memory_bytes": gpu.memory},
        "ranks": {"data_parallel": run.dp, "tensor_parallel": run.tp},
        "zero_stage": run.stage,
        "micro_batch": run.micro,
        "gradient_accumulation_steps": run.accumulation,
        "parameters_per_rank": found.elements,
        "peak": {
            "moment": needed.peak.moment,
            "held_bytes": needed.peak.held,
            "allocated_bytes": needed.peak.allocated,
            "reserved_bytes": needed.peak.reserved,
        },
        "host_bytes": found.hosted,
        "needed_bytes": needed.total,
        "fits": needed.total <= gpu.memory,
        "largest_micro_batch": largest_micro_batch(run, gpu),
        "choices": choice_rows(run, gpu),
    }


def text(run: Run, gpu: GPU) -> str:
    """The answer for a reader."""
    found, needed = states(run), need(run, gpu).total
    verdict = "fits" if needed <= gpu.memory else "DOES NOT FIT"
    lines = [
        f"{found.elements:,} parameters a rank before ZeRO-{run.stage}; {run.dp} data- x {run.tp} "
        f"tensor-parallel ranks; micro-batch {run.micro} of {run.model.seq_length} tokens, "
        f"{run.accumulation} a step",
        table(run, gpu),
        f"{verdict}: needs {size(needed)} of {size(gpu.memory)} ({gpu.name}); largest micro-batch: "
        f"{largest_micro_batch(run, gpu) or 'none'}",
    ]
    if found.hosted:
        lines.append(f"{size(found.hosted)} of a rank's states are in host memory")
    lines += ["choices that fit:", *(choice_lines(run, gpu) or ["  none"])]
    return "\n".join([*lines, _ACCURACY])


def planned(p: Any, gpu: GPU, library: Any = None) -> Run:
    """The run of a ``launch.train`` plan, with the micro-batch that is found if it is "auto"."""
    run = Run.of_plan(p, library)
    return with_largest_micro_batch(run, gpu) if p.auto else run


def dry_run(p: Any, rank: int = 0, library: Any = None) -> int:
    """Print, on rank 0, what a ``launch.train`` plan needs, without a process group, a GPU or a
    model; exit status.
    """
    gpu = chosen_gpu(p.args)
    run = planned(p, gpu, library)
    if rank == 0:
        if p.warning:
            say(p.warning, "warning")
        print(json.dumps(answer(run, gpu), indent=2) if p.args.json else text(run, gpu), flush=True)
    return 0
