"""Our accessors: moments and master weights of a parameter under ZeRO, whole and in fp32, however they are stored.

``safe_get_full_moment`` and ``safe_set_full_moment`` are public (``coat_dist``). ``deepspeed_accessors.py`` lets
DeepSpeed's own accessors answer with what these functions give.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ...checkpoint.zero_partitions import Fragment, Partition, base_optimizer, forget_second_shard, members, partitions
from ...flow.weights import invalidate_weights
from ...ops import split
from ...optim.master import read_master, write_master
from ...optim.moments import read_moment, write_moment
from ...optim.state import MOMENTS, WhichMoment, ensure_state
from .fp8_gather import let_go

__all__ = [
    "find_trained",
    "fragment_of",
    "get_full_master",
    "check_which",
    "register",
    "safe_get_full_moment",
    "safe_set_full_moment",
    "set_full_master",
]

# Not an attribute of parameters, as DeepSpeed would do it: those are copied and pickled along with them.
_trained_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak reference to the ZeRO optimizer of the latest engine, by parameter; to none where that is not a CoatAdamW's. An
older engine on the same model is out of use: the parameters' memory is the latest one's."""


def register(zero: Any) -> None:
    """Let the accessors answer from this ZeRO optimizer, and for its parameters from no earlier one; where it has no
    CoatAdamW, from none. The list in ``attach.py`` calls it."""
    known = weakref.ref(zero) if base_optimizer(zero) is not None else None
    for param in (p for params in members(zero) for p in params):
        if known is not None:
            _trained_by[param] = known
        else:
            _trained_by.pop(param, None)


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
    moment = check_which(which)

    def read(part: Partition, state: dict[str, Any], f: Fragment) -> torch.Tensor | None:
        return read_moment(state, part.group, moment, f.start, f.numel) if "step" in state else None

    return _assemble(param, read)


def safe_set_full_moment(param: torch.nn.Parameter, value: torch.Tensor, which: str) -> None:
    """Replace a moment of a parameter; call it on every rank with the same value.

    With FP8 moments, the few elements of other parameters that share a 128-element group with this one are encoded
    again and move within the encoding's error (see ``reference/moments.py``). Either moment may be set first.

    Args:
        param, which: as in :func:`safe_get_full_moment`.
        value: floating point, of the parameter's full shape, finite, not negative for the second moment.

    Raises:
        ValueError: names the argument, what was given and what is accepted. Nothing has been changed then.
    """
    moment = check_which(which)
    zero, _, shape = find_trained(param)
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
    state = ensure_state(zero.optimizer.state, part.flat, part.group)
    values = value.detach().reshape(-1)[f.first : f.first + f.numel].to(part.flat.device, torch.float32)
    # In place: DeepSpeed's own accessors may point at fp32 moments.
    write_moment(state, part.group, moment, f.start, values)


def get_full_master(param: torch.nn.Parameter) -> torch.Tensor:
    """Master weight of a parameter, fp32, of its full shape, to the bit; collective over data-parallel ranks.

    DeepSpeed's ``safe_get_full_fp32_param`` calls this where states have remainders (``master_weights.py``).
    """

    def read(part: Partition, state: dict[str, Any], f: Fragment) -> torch.Tensor:
        return read_master(part.flat, state, f.start, f.numel)

    return _assemble(param, read)


@torch.no_grad()
def set_full_master(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace a master weight, and with it the weight; call it on every rank with the same value, of the full size.

    Raises:
        ValueError: the value has another number of elements or no floating point. Nothing has been changed then.
    """
    zero, _, shape = find_trained(param)
    if value.numel() != shape.numel() or not value.is_floating_point():
        raise ValueError(
            f"value: got {value.dtype} {list(value.shape)}, accepted: floating point {list(shape)}, as the parameter"
        )
    whole = value.detach().reshape(-1).to(_device(zero), torch.float32)
    found = fragment_of(zero, param)
    if found is not None and found[1].numel:
        part, f = found
        state = ensure_state(zero.optimizer.state, part.flat, part.group)
        write_master(part.flat, state, f.start, whole[f.first : f.first + f.numel])
    let_go(param)
    forget_second_shard(param)
    if param.numel() == shape.numel():  # not a ZeRO-3 parameter that is in pieces now: its pieces have been written
        param.data.copy_(split(whole)[0].view(shape))
        invalidate_weights()  # a write to `data` raises no version that the cache of codes could see


def check_which(which: str) -> WhichMoment:
    """``which``, where it is "first" or "second"."""
    if which not in MOMENTS:
        raise ValueError(f"which: got {which!r}, accepted: 'first' or 'second'")
    return cast(WhichMoment, which)


def _assemble(
    param: torch.nn.Parameter, read: Callable[[Partition, dict[str, Any], Fragment], torch.Tensor | None]
) -> torch.Tensor:
    """A whole fp32 tensor from what ``read`` finds of it on each rank; zeros where that is None."""
    zero, group, shape = find_trained(param)
    full = torch.zeros(shape.numel(), dtype=torch.float32, device=_device(zero))
    found = fragment_of(zero, param)
    if found is not None and found[1].numel:
        part, f = found
        values = read(part, zero.optimizer.state.get(part.flat) or {}, f)
        if values is not None:
            full[f.first : f.first + f.numel] = values
    dist.all_reduce(full.view(torch.int32), group=group)  # as integers, minus zero stays what it is
    return full.view(shape)


def find_trained(param: Any) -> tuple[Any, dist.ProcessGroup, torch.Size]:
    """ZeRO optimizer, data-parallel group and full shape of a parameter.

    Raises:
        ValueError: no CoatAdamW trains it.
    """
    zero = _trained_by[param]() if isinstance(param, torch.Tensor) and param in _trained_by else None
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
