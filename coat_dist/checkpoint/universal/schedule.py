"""Where a learning-rate schedule was when a universal checkpoint was saved.

A schedule's own state comes with DeepSpeed's files. The rates that it had come to are the optimizer's: its groups keep
them, and several of torch's schedules compute the next rate from the last one. Universal checkpoints fill groups that
may be more or fewer, so the rates come from the schedule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .folder import read

__all__ = ["find_schedule_problems", "renew_rates"]

_ONE_A_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
"""What torch's schedules keep."""
_WITHOUT = "or load_lr_scheduler_states=False, with which the schedule starts anew"


def find_schedule_problems(engine: Any, folder: Path) -> list[str]:
    """What keeps the schedule of ``folder`` from going on in ``engine``; changes nothing."""
    schedule, file = engine.lr_scheduler, next(iter(sorted(folder.glob("*model_states.pt"))), None)
    if schedule is None or file is None:
        return []
    saved = read(file, weights_only=False).get("lr_scheduler")
    here = type(schedule).__name__
    if saved is None:
        return [f"scheduler: got {here}, accepted: none, as {folder} was saved without one, {_WITHOUT}"]
    if _is_deepspeeds(saved) != _is_deepspeeds(schedule.state_dict()):
        return [f"scheduler: got {here}, accepted: the schedule that {folder} was saved with, {_WITHOUT}"]
    rates, groups = saved.get("base_lrs"), len(engine.optimizer.param_groups)
    if isinstance(schedule, LRScheduler) and rates and len(rates) != groups and len(set(rates)) > 1:
        return [
            f"scheduler: {folder} has rates of {len(rates)} parameter groups and this run has {groups}, accepted: as "
            f'many (a group with "moments" is not divided), the same rate for all, {_WITHOUT}'
        ]
    return []


def renew_rates(engine: Any) -> None:
    """Give each parameter group the rate that the schedule, whose state has been loaded, says."""
    schedule, groups = engine.lr_scheduler, engine.optimizer.param_groups
    if isinstance(schedule, LRScheduler):
        _fit(schedule, len(groups))
        rates = schedule.get_last_lr()
    elif getattr(schedule, "last_batch_iteration", -1) >= 0:  # DeepSpeed's; below 0 it has not begun
        rates = schedule.get_lr()
    else:
        return
    for group, rate in zip(groups, rates, strict=True):
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _is_deepspeeds(state: dict[str, Any]) -> bool:
    return "last_batch_iteration" in state


def _fit(schedule: LRScheduler, groups: int) -> None:
    """One number a group, where the run that was saved had more or fewer groups, all with the same."""
    for inner in getattr(schedule, "_schedulers", ()):
        _fit(inner, groups)
    for name in _ONE_A_GROUP:
        values = getattr(schedule, name, None)
        if isinstance(values, list) and values and len(values) != groups and len(set(values)) == 1:
            setattr(schedule, name, values[:1] * groups)
