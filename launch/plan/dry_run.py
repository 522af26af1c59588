"""``pretrain.py --dry-run``: the planner's answer about this very run."""

from __future__ import annotations

from typing import Any

from launch.train.settings import batch_sizes

from .arguments import as_json, chosen_gpu
from .report import answer, text
from .run import Run
from .search import candidates

__all__ = ["dry_run"]


def dry_run(p: Any, rank: int = 0) -> int:
    """Print, on rank 0, what a ``Plan`` needs; no process group, no GPU and no model is touched. The exit status.

    Raises:
        CoatConfigError: a run that cannot be planned; names the key.
    """
    gpu, run = chosen_gpu(p.args), Run.of_plan(p)
    if p.auto:
        given = p.settings.get("train_batch_size"), p.settings.get("gradient_accumulation_steps")
        smallest = batch_sizes(p.settings, p.dp)  # where nothing fits, with the samples that a step is to have
        run = next(candidates(run, gpu, *given), run.but(micro=smallest.micro, accumulation=smallest.accumulation))
    if rank == 0:
        print(as_json(answer(run, gpu)) if p.args.json else text(run, gpu), flush=True)
    return 0
