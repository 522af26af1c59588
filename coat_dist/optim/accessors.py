"""Moments of single parameters of a model under ZeRO, whole and in fp32, whatever the optimizer stores."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import read_moment, write_moment
from .partitions import Fragment, Partition, base_optimizer, members, partitions
from .state import new_state

__all__ = ["fragment_of", "register", "safe_get_full_moment", "safe_set_full_moment"]

_WHICH = ("first", "second")
# Not an attribute of parameters, as DeepSpeed would do it: those are copied and pickled along with them.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def register(zero: Any) -> None:
    """Make a ZeRO optimizer known to the accessors; ``coat_dist.initialize`` does."""
    if base_optimizer(zero) is not None and zero is not base_optimizer(zero):
        _optimizers.add(zero)


def safe_get_full_moment(param: torch.nn.Parameter, which: str) -> torch.Tensor:
    """Decoded moment of a parameter, the same on all data-parallel ranks; collective over them.

    Under ``coat_dist.initialize``, DeepSpeed's ``safe_get_full_optimizer_state`` gives the same for "exp_avg" and
    "exp_avg_sq".

    Args:
        param: a trained parameter of a model that ``deepspeed.initialize`` was given, with a :class:`CoatAdamW`,
            ZeRO-1, 2, 3 or BF16_Optimizer.
        which: "first" (exp_avg) or "second" (exp_avg_sq).

    Returns:
        fp32, of the parameter's full shape (of this tensor-parallel rank), zeros before the first step.

    Raises:
        ValueError: names the argument, what was given and what is accepted.
    """
    zero, group, shape = _find(param, which)
    full = torch.zeros(shape.numel(), dtype=torch.float32)
    found = fragment_of(zero, param)
    if found is not None:
        part, f = found
        full = full.to(part.flat.device)
        state = zero.optimizer.state.get(part.flat) or {}
        if "step" in state and f.numel:
            full[f.first : f.first + f.numel] = read_moment(state, part.group, _WHICH.index(which), f.start, f.numel)
    full = full.to(_device(zero))
    dist.all_reduce(full, group=group)
    return full.view(shape)


def safe_set_full_moment(param: torch.nn.Parameter, value: torch.Tensor, which: str) -> None:
    """Replace a moment of a parameter; call it on every rank with the same value.

    With FP8 moments, the few elements of other parameters that share a 128-element group with this one are encoded
    again and move within the encoding's error (see ``reference/moments.py``).

    Args:
        param, which: as in :func:`safe_get_full_moment`.
        value: floating point, of the parameter's full shape, finite, not negative for the second moment.

    Raises:
        ValueError: names the argument, what was given and what is accepted. Nothing has been changed then.
    """
    zero, _, shape = _find(param, which)
    if value.shape != shape or not value.is_floating_point():
        raise ValueError(
            f"value: got {value.dtype} {list(value.shape)}, accepted: floating point {list(shape)}, as the parameter"
        )
    if value.numel() and (not value.isfinite().all() or (which == "second" and value.min() < 0)):
        raise ValueError(
            "value: got elements that are not finite or, of the second moment, negative; accepted: finite numbers, "
            "squares for the second"
        )
    found = fragment_of(zero, param)
    if found is None or not found[1].numel:
        return
    part, f = found
    optimizer = zero.optimizer
    state = optimizer.state.get(part.flat) or {}
    if "step" not in state:
        state = new_state(part.flat, part.group)
        optimizer.state[part.flat].update(state)
        state = optimizer.state[part.flat]
    values = value.detach().reshape(-1)[f.first : f.first + f.numel].to(part.flat.device, torch.float32)
    # In place: DeepSpeed's own accessors may point at fp32 moments.
    write_moment(state, part.group, _WHICH.index(which), f.start, values)


def _find(param: Any, which: str) -> tuple[Any, dist.ProcessGroup, torch.Size]:
    """ZeRO optimizer, data-parallel group and full shape of a parameter."""
    if which not in _WHICH:
        raise ValueError(f"which: got {which!r}, accepted: 'first' or 'second'")
    zero = next((z for z in _optimizers if any(p is param for params in members(z) for p in params)), None)
    if zero is None:
        shape = list(getattr(param, "ds_shape", getattr(param, "shape", [])))
        raise ValueError(
            f"param: got a {type(param).__name__} of shape {shape} that no CoatAdamW under ZeRO trains, accepted: a "
            "trained parameter of a model given to coat_dist.initialize with CoatAdamW and ZeRO stage 1, 2 or 3; "
            "DeepSpeed's safe_get_full_optimizer_state reads other optimizers"
        )
    if hasattr(param, "ds_id"):
        return zero, param.ds_process_group, torch.Size(param.ds_shape)
    return zero, param._dp_group, param.shape


def fragment_of(zero: Any, param: torch.nn.Parameter) -> tuple[Partition, Fragment] | None:
    """Where this rank keeps its part of ``param``; None where it has none."""
    return next(((part, f) for part in partitions(zero) for f in part.fragments if f.param is param), None)


def _device(zero: Any) -> torch.device:
    return next(part.flat.device for part in partitions(zero))
