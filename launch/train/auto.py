"""The micro-batch "auto": the largest one that fits by the planner, for the rank with the least
free memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import read_manifest
from launch.common.log_level import say
from launch.common.settings import MICRO, STEPS, TOTAL, batch_sizes
from launch.memory.fit import (
    GPU,
    choice_lines,
    choice_rows,
    need,
    not_torchs,
    size,
    with_largest_micro_batch,
)
from launch.memory.run import Run
from launch.train.plan import Plan


def settle(p: Plan, device: torch.device, source: Path | None) -> Plan:
    """The plan with the micro-batch that is found; collective.

    A micro-batch that was found for the run of ``source``, a checkpoint, stays.

    Raises:
        CoatConfigError: nothing fits, or this run cannot be planned; names the key.
    """
    if (micro := _recorded(p, source)) is not None:
        say(f"micro-batch: {micro}, found by the run that is continued")
        return _with_micro(p, micro)
    gpu = _usable(p, device)
    found = with_largest_micro_batch(Run.of_plan(p), gpu)
    chosen, needs = _with_micro(p, found.micro), need(found, gpu)
    steps = chosen.batch.accumulation
    if needs > gpu.memory:
        fitting = "\n".join(["Choices that fit:", *choice_lines(choice_rows(found, gpu))])
        raise CoatConfigError(
            f'{MICRO}: got "auto", accepted: settings with which a micro-batch fits that divides '
            f"{TOTAL} by the ranks; 1 sample needs {size(needs)} of {size(gpu.memory)}. {fitting}"
        )
    say(
        f"micro-batch: {found.micro} found ({steps} a step), needs {size(needs)} of "
        f"{size(gpu.memory)} by the plan"
    )
    return chosen


def _recorded(p: Plan, source: Path | None) -> int | None:
    """The micro-batch of the run that is continued, if it was found in the same way and for as
    many ranks.
    """
    earlier = {} if source is None else read_manifest(source)["run"]
    batch = earlier.get("batch", {})
    if batch.get("found") != "auto" or earlier.get("parallel") != p.identity()["parallel"]:
        return None
    total, steps, micro = p.settings.get(TOTAL), p.settings.get(STEPS), batch["micro"]
    if total is not None and (total % (micro * p.dp) or (steps and total != micro * p.dp * steps)):
        return None
    return micro


def _with_micro(p: Plan, micro: int) -> Plan:
    settings = {**p.settings, MICRO: micro}
    if settings.get(TOTAL) is not None:
        settings[STEPS] = settings[TOTAL] // (micro * p.dp)
    batch = batch_sizes(settings, p.dp)
    return replace(p, settings={**settings, STEPS: batch.accumulation}, batch=batch)


def _usable(p: Plan, device: torch.device) -> GPU:
    """A GPU with the memory that this run may use, the least of all ranks."""
    other, memory = p.args.other_memory or 0, p.args.gpu_memory or 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        # In use now, and an allowance for what comes later; never less than was measured elsewhere.
        now = total - free - torch.cuda.memory_reserved() + 2**30
        memory, other = memory or total, other or max(now, not_torchs(Run.of_plan(p)))
    elif not memory:
        raise CoatConfigError(
            f'{MICRO}: got "auto" without a GPU, accepted: an integer >= 1, or --gpu-memory with '
            "what may be used"
        )
    usable = torch.tensor([memory - other], dtype=torch.int64, device=device)
    dist.all_reduce(usable, dist.ReduceOp.MIN)
    return GPU("", int(usable), 0)
