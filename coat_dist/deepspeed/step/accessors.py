"""Accessors of moments and master weights of a parameter under ZeRO, in fp32, however they are
stored; and the links from parameters to their shards.

``safe_get_full_moment`` and ``safe_set_full_moment`` are public (``coat_dist``). DeepSpeed's own
accessors give the same: ``safe_get_full_optimizer_state``, ``safe_get_full_fp32_param``, their
``set`` forms and, at stage 3, their forms with ``local``. For a state they look for a tensor of the
parameter's elements under the key that they are given. With FP8 moments there is none: a rank that
holds part of the parameter would raise, and one that does not would hang. Here "exp_avg" and
"exp_avg_sq" mean the moments, and other keys raise on every rank. The master weight is read and
written with its lower half where there are remainders, which DeepSpeed does not know.

ZeRO-1, 2 and BF16_Optimizer link parameters to their shards of the master weights
(``_link_all_hp_params``) when they are built and after loading; :func:`after_linking` adds what has
to follow. ``"round_robin_gradients": true`` deals the parameters of a group out to the ranks in
turn, but DeepSpeed's links, accessors and ``param_slice_mappings`` count in the order of the group,
so they silently name elements of other parameters. :func:`relink` links them in the order of the
flat tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ...checkpoint.zero_partitions import (
    Fragment,
    Partition,
    base_optimizer,
    forget_second_shard,
    members,
    partitions,
)
from ...flow.core.weights import invalidate_weights
from ...ops import split
from ...optim.master import read_master, write_master
from ...optim.moments import read_moment, write_moment
from ...optim.state import MOMENT_OF, MOMENTS, WhichMoment, ensure_state
from .fp8_gather import let_go
from .master_weights import keeps_remainders

# Not an attribute of parameters, as DeepSpeed would do it: those are copied and pickled along with
# them.
_trained_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak reference to the ZeRO optimizer of the latest engine, by parameter. An older engine on the
same model is out of use: the parameters' memory is the latest one's.
"""


def register(zero: Any) -> None:
    """Let the accessors answer for these parameters from this ZeRO optimizer, and from no earlier
    one. Without a CoatAdamW in it they refuse. The list in ``attach.py`` calls it.
    """
    for param in (p for params in members(zero) for p in params):
        _trained_by[param] = weakref.ref(zero)


def safe_get_full_moment(param: torch.nn.Parameter, which: str) -> torch.Tensor:
    """Decoded moment of a parameter, the same on all data-parallel ranks; collective over them.

    Args:
        param: a trained parameter of a model that ``deepspeed.initialize`` was given, with a
            :class:`CoatAdamW`, ZeRO-1, 2, 3 or BF16_Optimizer.
        which: "first" (exp_avg) or "second" (exp_avg_sq).

    Returns:
        fp32, of the parameter's full shape (of this tensor-parallel rank), zeros before the first
        step.

    Raises:
        ValueError: names the argument, what was given and what is accepted.
    """
    return _get_full(param, _check_which(which))


def safe_set_full_moment(param: torch.nn.Parameter, value: torch.Tensor, which: str) -> None:
    """Replace a moment of a parameter; call it on every rank with the same value.

    With FP8 moments, the few elements of other parameters that share a 128-element group with this
    one are encoded again and move within the encoding's error (see ``reference/moments.py``).
    Either moment may be set first.

    Args:
        param, which: as in :func:`safe_get_full_moment`.
        value: floating point, of the parameter's full shape, finite, not negative for the second
            moment.

    Raises:
        ValueError: names the argument, what was given and what is accepted. Nothing has been
            changed then.
    """
    moment = _check_which(which)
    if value.numel() and (not value.isfinite().all() or (which == "second" and value.min() < 0)):
        raise ValueError(
            "value: got elements that are not finite or, of the second moment, negative"
        )
    _set_full(param, value, moment)


def _check_which(which: str) -> WhichMoment:
    if which not in MOMENTS:
        raise ValueError(f"which: got {which!r}, accepted: 'first' or 'second'")
    return cast(WhichMoment, which)


def _wrong(value: torch.Tensor, size: Any) -> ValueError:
    return ValueError(
        f"value: got {value.dtype} {list(value.shape)}, accepted: floating point {size}"
    )


# Below, `which` is a moment, or None for the master weight.


def _read(
    zero: Any, part: Partition, which: WhichMoment | None, start: int, numel: int
) -> torch.Tensor:
    state = zero.optimizer.state.get(part.flat) or {}
    if which is None:
        return read_master(part.flat, state, start, numel)
    if "step" not in state:
        return torch.zeros(numel, device=part.flat.device)
    return read_moment(state, part.group, which, start, numel, part.flat.device)


def _write(
    zero: Any, part: Partition, which: WhichMoment | None, start: int, values: torch.Tensor
) -> None:
    state = ensure_state(zero.optimizer.state, part.flat, part.group)
    values = values.to(part.flat.device, torch.float32)
    if which is None:
        write_master(part.flat, state, start, values)
    else:  # in place: DeepSpeed's own accessors may point at fp32 moments
        write_moment(state, part.group, which, start, values)


def _get_full(param: torch.nn.Parameter, which: WhichMoment | None) -> torch.Tensor:
    """A whole fp32 tensor, to the bit; collective over data-parallel ranks."""
    zero, group, shape = _find_trained(param)
    full = torch.zeros(shape.numel(), dtype=torch.float32, device=_device(zero))
    for part, f in _fragments_of(zero, param):
        full[f.first : f.first + f.numel] = _read(zero, part, which, f.start, f.numel)
    dist.all_reduce(full.view(torch.int32), group=group)  # as integers, minus zero stays what it is
    return full.view(shape)


@torch.no_grad()
def _set_full(param: torch.nn.Parameter, value: torch.Tensor, which: WhichMoment | None) -> None:
    """Replace a tensor of the full size, and with a master weight that has a remainder the weight,
    which is its upper half; called on every rank with one value.
    """
    zero, _, shape = _find_trained(param)
    if value.numel() != shape.numel() or not value.is_floating_point():
        raise _wrong(value, list(shape))
    whole = value.detach().reshape(-1)
    for part, f in _fragments_of(zero, param):
        _write(zero, part, which, f.start, whole[f.first : f.first + f.numel])
    if which is not None or not keeps_remainders(zero):
        return
    let_go(param)
    forget_second_shard(param)
    # Not a ZeRO-3 parameter that is in pieces now: its pieces have been written.
    if param.numel() == shape.numel():
        param.data.copy_(split(whole.to(_device(zero), torch.float32))[0].view(shape))
        # A write to `data` raises no version that the cache of codes could see.
        invalidate_weights()


def _get_local(param: Any, which: WhichMoment | None) -> torch.Tensor:
    """This rank's part under ZeRO-3, fp32, padded as DeepSpeed gives it."""
    zero, part, f = _local(param)
    padded = param.ds_tensor.ds_numel
    if which is None:
        return _read(zero, part, None, f.start, padded)
    local = torch.zeros(padded, device=part.flat.device)
    local[: f.numel] = _read(zero, part, which, f.start, f.numel) if f.numel else 0.0
    return local


def _set_local(param: Any, value: torch.Tensor, which: WhichMoment | None) -> None:
    zero, part, f = _local(param)
    if value.numel() != (padded := param.ds_tensor.ds_numel) or not value.is_floating_point():
        raise _wrong(value, f"{padded} elements, this rank's part of the parameter")
    if numel := padded if which is None else f.numel:
        _write(zero, part, which, f.start, value.detach().reshape(-1)[:numel])


def _local(param: Any) -> tuple[Any, Partition, Fragment]:
    zero = _find_trained(param)[0]  # an error for one that was frozen when the engine was made
    return zero, *next(_fragments_of(zero, param, empty=True))


def _find_trained(param: Any) -> tuple[Any, dist.ProcessGroup, torch.Size]:
    """ZeRO optimizer, data-parallel group and full shape of a parameter."""
    reference = _trained_by.get(param) if isinstance(param, torch.Tensor) else None
    zero = None if reference is None else reference()
    if base_optimizer(zero) is None:
        shape = list(getattr(param, "ds_shape", getattr(param, "shape", [])))
        given = f"got a {type(param).__name__} of shape {shape} that no CoatAdamW under ZeRO trains"
        raise ValueError(
            f"param: {given}, accepted: a trained parameter of the latest engine of its model"
        )
    if hasattr(param, "ds_id"):
        return zero, param.ds_process_group, torch.Size(param.ds_shape)
    return zero, param._dp_group, param.shape


def _fragments_of(
    zero: Any, param: Any, empty: bool = False
) -> Iterator[tuple[Partition, Fragment]]:
    """Where this rank keeps its part of ``param``, if it has one; ZeRO-3 has empty ones, too."""
    for part in partitions(zero):
        for f in part.fragments:
            if f.param is param and (f.numel or empty):
                yield part, f


def _device(zero: Any) -> torch.device:
    return next(part.flat.device for part in partitions(zero))


# DeepSpeed's accessors.


def answer_on_parameters(zero: Any) -> None:
    """Answer for a ZeRO-1, 2 or BF16_Optimizer with a CoatAdamW: by methods of every parameter,
    which DeepSpeed puts there whenever it links them; so this comes :func:`after_linking`.
    """
    for param in (p for params in members(zero) for p in params):
        param.get_full_hp_param = functools.partial(_get_by_key, _get_full, param)
        param.set_full_hp_param = functools.partial(_set_by_key, _set_full, param)


def answer_on_optimizer(zero: Any) -> None:
    """Answer for a ZeRO-3 optimizer with a CoatAdamW, by its methods."""
    zero.get_full_hp_param = functools.partial(_get_by_key, _get_full)
    zero.set_full_hp_param = functools.partial(_set_in_order_of_stage_3, _set_full)
    zero.get_local_fp32_param = functools.partial(_get_by_key, _get_local)
    zero.set_local_hp_param = functools.partial(_set_in_order_of_stage_3, _set_local)


def _which_of(key: str | None) -> WhichMoment | None:
    """The moment that DeepSpeed calls ``key``; None for the master weight."""
    if key is not None and key not in MOMENT_OF:
        raise ValueError(
            f"optim_state_key: got {key!r}, accepted with CoatAdamW: {', '.join(MOMENT_OF)}"
        )
    return None if key is None else MOMENT_OF[key]


# As with torch's AdamW, a frozen parameter has no state, and nothing is set.


def _get_by_key(get: Callable, param: Any, optim_state_key: str | None = None) -> Any:
    which = _which_of(optim_state_key)
    return get(param, which) if param.requires_grad else None


def _set_by_key(
    put: Callable, param: Any, value: torch.Tensor, optim_state_key: str | None = None
) -> None:
    which = _which_of(optim_state_key)
    if param.requires_grad:
        put(param, value, which)


def _set_in_order_of_stage_3(
    put: Callable, value: torch.Tensor, param: Any, optim_state_key: str | None = None
) -> None:
    """ZeRO-3 has the value before the parameter."""
    _set_by_key(put, param, value, optim_state_key)


# Links.


def after_linking(zero: Any, action: Callable[[Any], None]) -> None:
    """Call ``action(zero)`` now and after each time that a ZeRO-1, 2 or BF16_Optimizer links
    parameters, after the actions that came before; its parameters are linked again now.
    """
    link = zero._link_all_hp_params

    def link_and_act() -> None:
        link()
        action(zero)

    zero._link_all_hp_params = link_and_act
    link_and_act()


def deals_out(zero: Any) -> bool:
    """Whether one of DeepSpeed's ZeRO-1 and 2 optimizers deals parameters out in turn."""
    return bool(getattr(zero, "round_robin_gradients", False)) and hasattr(
        zero, "round_robin_bit16_groups"
    )


def relink(zero: Any) -> None:
    """Correct the links of an optimizer that :func:`deals_out`, now and whenever it links
    parameters again.
    """
    after_linking(zero, _link_all)
    zero._param_slice_mappings = zero._create_param_mapping()


def _link_all(zero: Any) -> None:
    """DeepSpeed's links, with the offsets that parameters have in the flat tensor. DeepSpeed takes
    these only in groups where parameters are padded, so all of them pass for that meanwhile.
    """
    padding = zero.round_robin_bit16_padding
    zero.round_robin_bit16_padding = [[1] for _ in padding]
    try:
        type(zero)._link_all_hp_params(zero)
    finally:
        zero.round_robin_bit16_padding = padding
