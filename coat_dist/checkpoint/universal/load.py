"""Loading universal checkpoints into CoatAdamW or torch's AdamW, at any parallel sizes and ZeRO stage.

DeepSpeed's own loader leaves fp32 moments in the optimizer's state and links parameters to them, so that 8 bytes a
parameter stay alive; it fails where a rank has no part of a group, restores neither frozen parameters nor buffers, and
at stage 3 does not divide by tensor-parallel ranks. :func:`enable_universal_load` therefore replaces the one
method of the ZeRO optimizer that does this; everything around it stays DeepSpeed's.

What a checkpoint does not fit is found first (``check.py``), on all ranks; then everything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...optim.adamw import CoatAdamW
from ...optim.master import write_master
from ...optim.moments import encode_moments, forget_written
from ...optim.state import MOMENTS, has_remainder, moment, new_state
from ..names import names_in_whole, names_of_others, part_of_joined
from ..read.load_checks import Request, check_before_load
from ..zero_partitions import Partition, copy_into, members, partitions
from .check import find_problems, modules_with_extra_state, renamed, untrained_tensors
from .codes import read_codes
from .folder import UniversalFolder
from .zero_files import KEYS, read

__all__ = ["enable_universal_load"]

_CHUNK = 1 << 24
"""Elements encoded at once: bounds the fp32 copy on the device to 64 MiB."""


def enable_universal_load(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` fill a CoatAdamW where ``"checkpoint": {"load_universal": true}`` is set.

    Works for torch's Adam and AdamW too; engines with another optimizer, or without ZeRO, are left alone. A checkpoint
    that does not fit is refused with a ``ValueError``, on every rank, before anything has been changed.
    ``coat_dist.initialize`` calls it.
    """
    zero = engine.optimizer
    if not isinstance(getattr(zero, "optimizer", None), CoatAdamW | torch.optim.Adam):  # AdamW is an Adam
        return
    others = names_of_others(engine)
    checked: dict[Path, Request] = {}

    def check(request: Request) -> list[str]:
        if not engine.load_universal_checkpoint():
            return []
        found = find_problems(engine, _open_folder(engine, request.folder), request.states, request.strict, others)
        found += _schedule_problems(engine, request.folder) if request.schedule else []
        checked.clear()
        if not found:
            checked[request.folder] = request
        return found

    def load(checkpoint_folder: str, load_optimizer_states: bool = True, load_from_fp32_weights: bool = False) -> None:
        request = checked.pop(Path(checkpoint_folder))
        _fill_engine(engine, _open_folder(engine, request.folder), request.states)
        if request.schedule:
            _renew_rates(engine)

    zero._load_universal_checkpoint = load
    check_before_load(engine, "universal", check)


def _open_folder(engine: Any, folder: str | Path) -> UniversalFolder:
    return UniversalFolder(Path(folder), _tensor_parallel(engine))


@torch.no_grad()
def _fill_engine(engine: Any, source: UniversalFolder, moments: bool) -> None:
    """Fill fp32 weights, moments (or weights alone), frozen parameters, buffers and extra states.

    Moments are encoded to nearest, for all groups; groups whose codes the checkpoint holds get these bytes
    (``codes.py``). Hyperparameters stay the present ones, but for learning rates by a schedule. A
    parameter that is frozen now takes its weights from wherever they are, the fp32 weight of one that was trained
    rounded to its own dtype. The caller has the 16-bit weights renewed at stages 1 and 2, as DeepSpeed does.
    """
    zero, names = engine.optimizer, names_in_whole(engine)
    parts = list(partitions(zero))
    rename = renamed(engine)
    forget_written()
    for name, module in modules_with_extra_state(engine).items():  # first: the model's own code, which may refuse
        if rename(name) in source.extra:
            module.set_extra_state(source.extra_state(rename(name)))
    for part, params in zip(parts, members(zero), strict=True):
        weights = _read_partition(engine, part, source, names, "fp32")
        if moments:
            # A rank that holds nothing of a group still steps it: bias correction needs the same count on all ranks.
            step = next((source.step(names[p]) for p in [f.param for f in part.fragments] or params), 0)
            _fill_state(engine, part, source, names, step)
        _fill_weights(zero.optimizer, part, weights)
    if moments:
        _relink(parts, zero.optimizer)
    _load_loss_scale(zero, source.globals)
    _renew_stage3(zero)
    for name, target in untrained_tensors(engine).items():
        if source.has(rename(name)):
            copy_into(target, source.weights(rename(name), getattr(target, "ds_shape", target.shape)))


def _fill_state(engine: Any, part: Partition, source: UniversalFolder, names: Mapping, step: int) -> None:
    """Replace the state of one partition."""
    base = engine.optimizer.optimizer
    if not isinstance(base, CoatAdamW):
        moments = {key: _read_partition(engine, part, source, names, key).to(part.flat.device) for key in KEYS[1:]}
        on_device = part.group.get("fused") or part.group.get("capturable")
        count = torch.tensor(float(step), device=part.flat.device if on_device else "cpu")
        base.state[part.flat] = {"step": count, **moments}
        return
    state = new_state(part.flat, part.group)
    state["step"] = step
    both = [_read_partition(engine, part, source, names, key) for key in KEYS[1:]]
    if part.group["moments"] == "fp32":
        for key, flat in zip(KEYS[1:], both, strict=True):
            state[key].copy_(flat)
    else:
        size = part.group["group_size"]
        rows = max(_CHUNK // size, 1)
        for first in range(0, part.flat.numel(), rows * size):
            chunks = (x[first : first + rows * size].to(part.flat.device) for x in both)
            for which, encoded in zip(MOMENTS, encode_moments(part.group, *chunks), strict=True):
                stored = moment(state, which)
                type(stored)(*(t[first // size :][: len(encoded.a)] for t in stored)).copy_(encoded)
        for f in part.fragments:
            read_codes(source.codes(names[f.param]), state, part.group, (f.first, f.start, f.numel), source.tp)
    old = base.state.get(part.flat) or {}
    state |= {k: old[k] for k in ("coat_seed",) if k in old}
    base.state[part.flat] = state


def _fill_weights(base: Any, part: Partition, weights: torch.Tensor) -> None:
    """Replace the master weights of one partition; a remainder is part of the state, which may not exist yet."""
    state = base.state.get(part.flat) or {}
    if "step" not in state and has_remainder(part.group):
        base.state[part.flat] = state = new_state(part.flat, part.group)
    write_master(part.flat, state, 0, weights)


def _read_partition(engine: Any, part: Partition, source: UniversalFolder, names: Mapping, key: str) -> torch.Tensor:
    """This rank's partition of the weights or a moment, flat, fp32, on the CPU; padding is zero."""
    flat = torch.zeros(part.flat.numel())
    for f in part.fragments:
        name = names[f.param]
        shape, mine = part_of_joined(engine, name, f.shape)
        values = source.weights(name, shape) if key == "fp32" else source.local(name, key, shape)
        flat[f.start : f.start + f.numel] = values.reshape(-1)[mine][f.first : f.first + f.numel]
    return flat


def _relink(parts: list[Partition], base: Any) -> None:
    """Point DeepSpeed's accessors at the new state (at stages 1 and 2), so that the old one is freed."""
    for part in parts:
        for f in part.fragments:
            mapping = getattr(f.param, "_hp_mapping", None)
            if mapping is not None:
                mapping.set_optim_state_fragment(part.flat, base.state[part.flat])


def _renew_stage3(zero: Any) -> None:
    """16-bit partitions from the fp32 ones, as DeepSpeed's own stage-3 loading does."""
    for i, flat in enumerate(getattr(zero, "fp32_partitioned_groups_flat", ())):
        half = zero.fp16_partitioned_groups_flat[i]
        if flat.numel():
            half.data.copy_(flat.data)
        params = zero.fp16_partitioned_groups[i]
        for param, renewed in zip(params, zero.unflatten(half, params), strict=True):
            param.data = renewed.data


def _load_loss_scale(zero: Any, saved: Mapping[str, Any]) -> None:
    """The loss scale, where saved and present run scale in the same way (fp16 by fp16, not fp16 by bf16)."""
    for key in ("loss_scaler", "dynamic_loss_scale"):
        if key in saved and type(saved[key]) is type(getattr(zero, key, None)):
            setattr(zero, key, saved[key])


def _tensor_parallel(engine: Any) -> tuple[int, int]:
    """(rank, size)."""
    mpu = engine.mpu
    for kind in ("tensor_model_parallel", "model_parallel"):
        if hasattr(mpu, f"get_{kind}_world_size"):
            return getattr(mpu, f"get_{kind}_rank")(), getattr(mpu, f"get_{kind}_world_size")()
    return 0, 1


def _schedule_problems(engine: Any, folder: Path) -> list[str]:
    """Whether the schedule of ``folder`` can go on in ``engine``; torch's would take over any other one's values."""
    schedule, file = engine.lr_scheduler, next(iter(sorted(folder.glob("*model_states.pt"))), None)
    if schedule is None or file is None:
        return []
    saved = read(file).get("lr_scheduler")
    if saved is not None and ("last_batch_iteration" in saved) == ("last_batch_iteration" in schedule.state_dict()):
        return []
    return [
        f"scheduler: got {type(schedule).__name__}, accepted: the schedule that {folder} was saved with, if any, or "
        "load_lr_scheduler_states=False, with which the schedule starts from its beginning"
    ]


def _renew_rates(engine: Any) -> None:
    """Give each parameter group the rate that the schedule, whose state has been loaded, says.

    The rates are the optimizer's, whose groups may be more or fewer than those that were saved, and several of torch's
    schedules compute the next rate from the last one.
    """
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


def _fit(schedule: LRScheduler, groups: int) -> None:
    """Make a schedule's lists as long as there are groups, where the saved groups all had the same value."""
    for inner in getattr(schedule, "_schedulers", ()):
        _fit(inner, groups)
    for name in ("base_lrs", "_last_lr", "min_lrs", "max_lrs"):
        values = getattr(schedule, name, None)
        if isinstance(values, list) and values and len(values) != groups and len(set(values)) == 1:
            setattr(schedule, name, values[:1] * groups)
