"""Loading universal checkpoints into CoatAdamW or torch's AdamW, at any parallel sizes and ZeRO
stage.

DeepSpeed's own loader leaves fp32 moments in the optimizer's state and links parameters to them, so
that 8 bytes a parameter stay alive; it fails where a rank has no part of a group, restores neither
frozen parameters nor buffers, and at stage 3 does not divide by tensor-parallel ranks.
:func:`enable_universal_load` therefore replaces the one method of the ZeRO optimizer that does
this; everything around it stays DeepSpeed's.

Whether the checkpoint fits is checked first, on all ranks; then everything is loaded.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...optim.adamw import CoatAdamW
from ...optim.master import write_master
from ...optim.moments import forget_written, write_moment
from ...optim.state import MOMENT_OF, has_remainder, new_state
from ..names import in_whole, info_of, names_in_whole, names_of_others, part_of_joined
from ..read.load_checks import Request, check_before_load
from ..zero_partitions import Partition, copy_into, members, partitions
from .codes import load_codes, read_codes
from .folder import UniversalFolder
from .zero_files import KEYS, read

_CHUNK = 1 << 24
"""Elements encoded at once: bounds the fp32 copy on the device to 64 MiB."""
_LENIENT = "accepted: what this model holds, or load_module_strict=False, which passes over them"


def enable_universal_load(engine: Any) -> None:
    """Let ``engine.load_checkpoint`` fill a CoatAdamW where ``"checkpoint": {"load_universal":
    true}`` is set.

    Works for torch's Adam and AdamW too, under ZeRO. A checkpoint that does not fit is refused with
    a ``ValueError``, on every rank, before anything has been changed.
    """
    others = names_of_others(engine)
    checked: list[tuple[_Loader, Request]] = []

    def check(request: Request) -> list[str]:
        loader = _Loader(engine, request.folder)
        found = loader.misfits(request.states)
        if request.strict and not found:
            found = loader.strangers(others)
        if request.schedule:
            found += _schedule_problems(engine, request.folder)
        checked[:] = [] if found else [(loader, request)]
        return found

    def load(*_: Any) -> None:  # what DeepSpeed gives is in the request, too
        loader, request = checked.pop()
        loader.fill(request.states)
        if request.schedule:
            _renew_rates(engine)

    engine.optimizer._load_universal_checkpoint = load
    check_before_load(engine, check, universal=True)


class _Loader:
    """One universal checkpoint and one engine with ZeRO-1, 2, 3 or BF16_Optimizer."""

    def __init__(self, engine: Any, folder: Path) -> None:
        from deepspeed.utils import bwc

        self.engine, self.zero = engine, engine.optimizer
        rank = bwc.bwc_tensor_model_parallel_rank(engine.mpu)
        size = bwc.bwc_tensor_model_parallel_world_size(engine.mpu)
        self.source = UniversalFolder(folder, (rank, size))
        self.names = names_in_whole(engine)
        self.parts, self.params = list(partitions(self.zero)), members(self.zero)
        rename, plain = in_whole(info_of(engine)), torch.nn.Module.set_extra_state
        stepped = {id(p) for params in self.params for p in params}
        untrained = {n: p for n, p in engine.module.named_parameters() if id(p) not in stepped}
        # What no optimizer steps, buffers, and modules with extra states, by their names in the
        # whole model.
        self.frozen: dict[str, torch.Tensor] = {rename(n): p for n, p in untrained.items()}
        self.buffers = {rename(n): b for n, b in engine.module.named_buffers()}
        self.saved_buffers = set(map(rename, engine._get_buffer_names()))
        self.extra = {
            rename(f"{n}.".lstrip(".") + "_extra_state"): module
            for n, module in engine.module.named_modules()
            if getattr(type(module), "set_extra_state", plain) is not plain
        }

    def misfits(self, moments: bool) -> list[str]:
        """A line for each group whose moments do not fit. Reads the files' headers and the small
        ones among them.

        Raises:
            ValueError: the first file that is missing, cannot be read or holds another shape.
        """
        source, found = self.source, []
        held_here = [self.names[f.param] for part in self.parts for f in part.fragments]
        new = [name for name in held_here if name in source.rest]
        if new and moments:
            return [
                f"{source.folder}: {_some(new)} had no moments when this was saved and would have "
                "some now, accepted: the same frozen parameters, or load_optimizer_states=False, "
                "which loads weights alone"
            ]
        for part, params in zip(self.parts, self.params, strict=True):
            for f in part.fragments:
                name = self.names[f.param]
                shape, _ = part_of_joined(self.engine, name, f.shape)
                for key in KEYS if moments else KEYS[:1]:
                    source.part(name, shape, key)
                if moments:
                    load_codes(source.codes(name))
            held: list[str] = []
            if moments:
                held = [self.names[p] for p in [f.param for f in part.fragments] or params[:1]]
            if len(steps := {source.step(name) for name in held}) > 1:
                found.append(
                    f"{source.folder}: got steps {sorted(steps)} of {_some(held)}, accepted: one, "
                    "as ZeRO counts them together"
                )
        for name, target in (self.frozen | self.buffers).items():
            if source.has(name):
                source.part(name, getattr(target, "ds_shape", target.shape))
        for name in source.extra.keys() & self.extra.keys():
            source.extra_state(name)
        return found

    def strangers(self, others: Set[str]) -> list[str]:
        """A line for names that only the checkpoint has, or only the model; ``others``: those
        that other ranks hold.
        """
        source = self.source
        if not source.complete:
            return []
        known = (
            {self.names[p] for params in self.params for p in params}
            | self.frozen.keys()
            | self.buffers.keys()
        )
        unknown = (
            source.rest.keys() | source.trained()
        ) - known | source.extra.keys() - self.extra.keys()
        missing = {name for name in self.frozen.keys() | self.saved_buffers if not source.has(name)}
        kinds = {"got": unknown - others, "missing": missing}
        return [
            f"{source.folder}: {kind} {_some(sorted(names))}, {_LENIENT}"
            for kind, names in kinds.items()
            if names
        ]

    @torch.no_grad()
    def fill(self, moments: bool) -> None:
        """Fill fp32 weights, moments (or weights alone), frozen parameters, buffers and extra
        states.

        Moments are encoded to nearest, for all groups; groups whose codes the checkpoint holds get
        these bytes (``codes.py``). Hyperparameters stay the present ones, but for learning rates by
        a schedule. A parameter that is frozen now takes its weights from wherever they are, the
        fp32 weight of one that was trained rounded to its own dtype. The caller renews the 16-bit
        weights at stages 1 and 2, as DeepSpeed does.
        """
        zero, source = self.zero, self.source
        for name, module in self.extra.items():  # first: the model's own code, which may refuse
            if name in source.extra:
                module.set_extra_state(source.extra_state(name))
        for part, params in zip(self.parts, self.params, strict=True):
            weights = self._read(part, "fp32")
            if moments:
                # A rank that holds nothing of a group still steps it: bias correction needs one
                # count on all ranks.
                held = [f.param for f in part.fragments] or params
                self._fill_state(part, next((source.step(self.names[p]) for p in held), 0))
            self._fill_weights(part, weights)
        if moments and hasattr(zero, "_hp_optimizer_states_linked"):
            # Stages 1 and 2: DeepSpeed's accessors point at the old states, and keep them alive.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        # Where both runs scale in the same way, fp16 or bf16.
        for key in ("loss_scaler", "dynamic_loss_scale"):
            if key in source.globals and type(source.globals[key]) is type(
                getattr(zero, key, None)
            ):
                setattr(zero, key, source.globals[key])
        for i in range(len(getattr(zero, "fp32_partitioned_groups_flat", ()))):
            # Stage 3: weights from the master weights, as after a step.
            zero._reassign_or_swap_out_partitioned_parameters(i)
        for name, target in (self.frozen | self.buffers).items():
            if source.has(name):
                copy_into(target, source.part(name, getattr(target, "ds_shape", target.shape)))

    def _fill_state(self, part: Partition, step: int) -> None:
        """Replace the state of one partition."""
        base = self.zero.optimizer
        both = {key: self._read(part, key) for key in KEYS[1:]}
        if not isinstance(base, CoatAdamW):
            on_device = part.group.get("fused") or part.group.get("capturable")
            count = torch.tensor(float(step), device=part.flat.device if on_device else "cpu")
            moments = {key: flat.to(part.flat.device) for key, flat in both.items()}
            base.state[part.flat] = {"step": count, **moments}
            return
        state = new_state(part.flat, part.group)
        state["step"] = step
        for first in range(0, part.flat.numel(), _CHUNK):
            for key in ("exp_avg_sq", "exp_avg"):  # ratios of first moments need the second ones
                values = both[key][first : first + _CHUNK].to(part.flat.device)
                write_moment(state, part.group, MOMENT_OF[key], first, values)
            forget_written()
        if part.group["moments"] == "fp8":
            for f in part.fragments:
                codes = self.source.codes(self.names[f.param])
                read_codes(codes, state, part.group, (f.first, f.start, f.numel), self.source.tp)
        old = base.state.get(part.flat) or {}
        state |= {k: old[k] for k in ("coat_seed",) if k in old}
        base.state[part.flat] = state

    def _fill_weights(self, part: Partition, weights: torch.Tensor) -> None:
        """Replace the master weights of one partition; a remainder is part of the state, which
        may not exist yet.
        """
        states = self.zero.optimizer.state
        state = states.get(part.flat) or {}
        if "step" not in state and has_remainder(part.group):
            states[part.flat] = state = new_state(part.flat, part.group)
        write_master(part.flat, state, 0, weights)

    def _read(self, part: Partition, key: str) -> torch.Tensor:
        """This rank's partition of the weights or a moment, flat, fp32, on the CPU; padding is
        zero.
        """
        flat = torch.zeros(part.flat.numel())
        for f in part.fragments:
            name = self.names[f.param]
            shape, mine = part_of_joined(self.engine, name, f.shape)
            values = self.source.part(name, shape, key).reshape(-1)[mine]
            flat[f.start : f.start + f.numel] = values[f.first : f.first + f.numel]
        return flat


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _schedule_problems(engine: Any, folder: Path) -> list[str]:
    """Whether the schedule of ``folder`` can go on in ``engine``; torch's would take over any
    other one's values.
    """
    schedule, file = engine.lr_scheduler, next(iter(sorted(folder.glob("*model_states.pt"))), None)
    if schedule is None or file is None:
        return []
    saved = read(file).get("lr_scheduler")
    mark = "last_batch_iteration"  # of DeepSpeed's
    if saved is not None and (mark in saved) == (mark in schedule.state_dict()):
        return []
    return [
        f"scheduler: got {type(schedule).__name__}, accepted: the schedule that {folder} was saved "
        "with, if any, or load_lr_scheduler_states=False, with which the schedule starts from its "
        "beginning"
    ]


def _renew_rates(engine: Any) -> None:
    """Give each parameter group the rate that the schedule, whose state has been loaded, says.

    The rates are the optimizer's, whose groups may be more or fewer than those that were saved, and
    several of torch's schedules compute the next rate from the last one.
    """
    schedule, groups = engine.lr_scheduler, engine.optimizer.param_groups
    if isinstance(schedule, LRScheduler):
        _fit(schedule, len(groups))
        rates = schedule.get_last_lr()
    # DeepSpeed's; below 0 it has not begun.
    elif getattr(schedule, "last_batch_iteration", -1) >= 0:
        rates = schedule.get_lr()
    else:
        return
    for group, rate in zip(groups, rates, strict=True):
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _fit(schedule: LRScheduler, groups: int) -> None:
    """Make a schedule's lists as long as there are groups, where the saved groups all had the
    same value.
    """
    for inner in getattr(schedule, "_schedulers", ()):
        _fit(inner, groups)
    for name in ("base_lrs", "_last_lr", "min_lrs", "max_lrs"):
        values = getattr(schedule, name, None)
        if isinstance(values, list) and values and len(values) != groups and len(set(values)) == 1:
            setattr(schedule, name, values[:1] * groups)
