"""Checks before ``engine.load_checkpoint`` reads one of DeepSpeed's own (not universal) checkpoints.

Such a checkpoint fits one layout only. DeepSpeed meets another stage with an empty AssertionError, another
data-parallel size at stage 3 with a complaint about tensor sizes, both after it has replaced the model's weights, and
flat shards in another order not at all. Here each of them is one error, before anything is read into the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .zero_files import MODEL3, OPTIMIZER, grid, read

__all__ = ["check_native_loads"]

_ACCEPTED = (
    "accepted: what wrote it, or the checkpoint converted by coat_dist.convert_to_universal (launch/to_universal.py) "
    'and "checkpoint": {"load_universal": true}'
)


def check_native_loads(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` refuse checkpoints of another layout with a ``ValueError``, on every rank.

    What the error names: ZeRO stage, data- and tensor-parallel size, where parameters lie in the flat shards. Loads
    without optimizer states are left to DeepSpeed. ``coat_dist.initialize`` calls it for CoatAdamW.
    """
    original: Callable = engine.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if load_optimizer_states and not load_module_only:
            _agree(functools.partial(_problems, engine, load_dir, tag))
        return original(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            **kwargs,
        )

    engine.load_checkpoint = load_checkpoint


def _problems(engine: Any, load_dir: str, tag: str | None) -> list[str]:
    latest = Path(load_dir) / "latest"
    if tag is None and not latest.is_file():
        return []  # DeepSpeed warns and loads nothing
    folder = Path(load_dir) / (tag if tag is not None else latest.read_text(encoding="utf-8").strip())
    if engine.load_universal_checkpoint():
        return []  # checked by load_universal
    if (folder / "zero").is_dir():
        return [f"checkpoint.load_universal: got false, accepted: true, for {folder} is a universal checkpoint"]
    files = grid(folder, OPTIMIZER)
    stage3 = bool(grid(folder, MODEL3, required=False))
    compared = {
        "zero_optimization.stage": [_stage(saved) for saved in (stage3, engine.zero_optimization_stage() == 3)],
        "data-parallel size": [len(files[0]), engine.dp_world_size],
        "tensor-parallel size": [len(files), engine.mp_world_size],
    }
    found = [
        f"{folder}: {name}: checkpoint has {saved}, this run has {own}"
        for name, (saved, own) in compared.items()
        if saved != own
    ]
    return found or _layout(engine, files)


def _stage(three: bool) -> str:
    return "3" if three else "1 or 2"


def _layout(engine: Any, files: list[list[Path]]) -> list[str]:
    """Whether flat shards hold the same elements in the same places."""
    zero = engine.optimizer
    tp_rank = 0 if engine.mpu is None or engine.mp_world_size == 1 else engine.mpu.get_model_parallel_rank()
    dp_rank = dist.get_rank(zero.dp_process_group) if hasattr(zero, "dp_process_group") else engine.global_rank
    path = files[tp_rank][dp_rank]
    saved = read(path)["optimizer_state_dict"]
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        sizes = [[t.numel() for t in flat] for flat in (saved["fp32_flat_groups"], zero.fp32_partitioned_groups_flat)]
        if sizes[0] != sizes[1]:
            return [
                f"{path}: zero_optimization.sub_group_size, or other parameters: checkpoint has sub-groups of "
                f"{sizes[0]} elements, this run has {sizes[1]}"
            ]
        return []
    places = [
        {name: (i, at.start, at.numel) for i, group in enumerate(mappings) for name, at in group.items()}
        for mappings in (saved["param_slice_mappings"], zero._param_slice_mappings)
    ]
    wrong = sorted(n for n in places[0].keys() | places[1].keys() if places[0].get(n) != places[1].get(n))
    if not wrong:
        return []
    there, here = (p.get(wrong[0]) for p in places)
    return [
        f"{path}: zero_optimization.round_robin_gradients or parameter_alignment, or other parameters or groups: "
        f"{wrong[0]} is at {_at(there)} in the checkpoint and at {_at(here)} in this run"
    ]


def _at(place: tuple[int, int, int] | None) -> str:
    return "no place" if place is None else f"elements {place[1]} to {place[1] + place[2]} of group {place[0]}"


def _agree(check: Callable[[], list[str]]) -> None:
    """Raise on every rank what any rank finds, so that none waits in a collective for one that raised."""
    try:
        mine = check()
    except ValueError as error:
        mine = [str(error)]
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    lines = list(dict.fromkeys(line for found in everyone for line in found))
    if lines:
        raise ValueError("\n".join(lines[:4]) + f"\n{_ACCEPTED}")
