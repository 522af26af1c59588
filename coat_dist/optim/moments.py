"""Moments in fp32, as other optimizers and checkpoint formats understand them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..ops import Moment, decode, encode, split
from .host import CHUNK
from .sharded import like, local
from .state import (
    CODE_KEYS,
    FP32_KEYS,
    MOMENTS,
    WhichMoment,
    check_state,
    codecs,
    has_remainder,
    moment,
    new_state,
    remainder,
)

_written: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First moments that :func:`write_moment` was given since the last step, fp32 on the CPU: {codes:
{start: values}}.

A normalized first moment is stored as its ratio to the root of the second one. Over a second moment
that is about to be replaced this ratio may span more than codes do, so the codes alone would not
give back what was written.
"""


def forget_written() -> None:
    """Forget what was written. Every step and every load calls this: they change moments."""
    if _written:
        _written.clear()


def export_moments(
    param: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments of one parameter as new fp32 tensors of its shape.

    Args:
        param: the parameter, or any tensor of its shape.
        state: its state, ``optimizer.state[param]``.
        group: its group, or any mapping with the group's storage options.

    Returns:
        ``exp_avg`` and ``exp_avg_sq``, on the state's device, decoded on the parameter's; of a
        DTensor, DTensors distributed as it is.

    Raises:
        ValueError: the state does not fit the parameter or the group.
    """
    check_state(state, param, group, "export_moments: state")
    if group["moments"] == "fp32":
        return state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    mine, home = local(param), state["coat_m_q"].device
    both = [torch.empty(mine.numel(), device=home) for _ in MOMENTS]
    for start in range(0, mine.numel(), CHUNK):
        numel = min(CHUNK, mine.numel() - start)
        moments, _ = _rows(state, group, start, numel)
        decoded = _decode_moments(group, *_on(mine.device if mine.is_cuda else home, moments))
        for out, values in zip(both, decoded, strict=True):
            out[start : start + numel].copy_(values[:numel])
    first, second = (like(param, x.view(mine.shape)) for x in both)
    return first, second


def import_moments(
    param: torch.Tensor,
    group: Mapping[str, Any],
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    master: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The state that stores the given moments as ``group`` says, rounded to nearest, where the
    group keeps states.

    To be assigned to ``optimizer.state[param]`` before the next step.

    Args:
        param, group: the parameter and its group.
        exp_avg, exp_avg_sq: moments, of the parameter's number of elements; floating point. Of a
            DTensor, DTensors distributed as it is.
        step: steps taken so far.
        master: with ``master_weights="bf16_remainder"``, the fp32 master weight, whose lower half
            goes into the state; the upper half is the parameter, which is not changed. None: the
            parameter itself.

    Raises:
        ValueError: ``master`` is given without a place for it.
        RuntimeError: torch's, of moments of another size.
    """
    if master is not None and not has_remainder(group):
        raise ValueError(
            "import_moments master: got a tensor, accepted: None, or "
            "master_weights='bf16_remainder'"
        )
    state = {**new_state(param, group), "step": int(step)}
    if master is not None:
        _, lower = split(local(master.detach()).reshape(-1).to(param.device, torch.float32))
        remainder(state, lower.numel()).copy_(lower)  # type: ignore[union-attr]
    given, shape = (exp_avg.detach(), exp_avg_sq.detach()), local(param).shape
    if group["moments"] == "fp32":
        for which, x in zip(MOMENTS, given, strict=True):
            values = x.to(param.device, torch.float32, copy=True)
            state[FP32_KEYS[which]] = values.reshape(param.shape)
        return state
    first, second = (local(x).to(param.device).reshape(shape) for x in given)
    for which, encoded in zip(MOMENTS, encode_moments(group, first, second), strict=True):
        moment(state, which).copy_(encoded)
    return state


def encode_moments(
    group: Mapping[str, Any], exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> tuple[Moment, Moment]:
    """Both moments of whole groups as codes, rounded to nearest.

    A normalized first moment is divided by the root of what the second one's codes mean, so that
    its own error is all that it has.
    """
    second = encode(exp_avg_sq, codecs(group).second)
    return _encode_first(group, exp_avg, second), second


def _encode_first(group: Mapping[str, Any], exp_avg: torch.Tensor, second: Moment) -> Moment:
    """The first moment of the elements whose second one is given as codes."""
    codec_m, codec_v = codecs(group)
    over = decode(second, codec_v, exp_avg.numel()) if codec_m.over_root else None
    return encode(exp_avg, codec_m, second=over)


def _decode_moments(
    group: Mapping[str, Any], first: Moment, second: Moment
) -> tuple[torch.Tensor, torch.Tensor]:
    """All elements of groups, the filling of the last one included, flat, fp32."""
    codec_m, codec_v = codecs(group)
    v = decode(second, codec_v)
    return decode(first, codec_m, second=v if codec_m.over_root else None), v


def regroup(
    state: Mapping[str, Any], param: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state whose groups are made of a shard's elements, from the code, amax and spacing of
    each element.

    Where the elements of each group have one amax and one spacing, bytes are kept. Else, as after a
    change of the sharding, both moments are decoded and encoded again, rounded to nearest.
    """
    each = {key: state[key].reshape(-1) for key in CODE_KEYS}
    size, home = group["group_size"], each[CODE_KEYS[0]].device
    result, same = {}, True
    for key, flat in each.items():
        filling = -len(flat) % size
        if key.endswith("_q"):
            result[key] = torch.cat([flat, flat.new_zeros(filling)]).view(-1, size)
        else:
            rows = torch.cat([flat, flat[-1:].expand(filling)]).view(-1, size)
            result[key] = rows[:, 0].clone()
            # An amax may be NaN.
            bits = rows.view(torch.int16) if flat.is_floating_point() else rows
            same = same and bool((bits == bits[:, :1]).all())
    if not same:
        device = param.device if param.is_cuda else home
        q_m, a_m, k_m, q_v, a_v, k_v = (flat.to(device) for flat in each.values())
        first, second = Moment(q_m[:, None], a_m, k_m), Moment(q_v[:, None], a_v, k_v)
        first, second = encode_moments(group, *_decode_moments(group, first, second))
        result = dict(zip(CODE_KEYS, (t.to(home) for t in (*first, *second)), strict=True))
    return {**state, **result}


def read_moment(
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    which: WhichMoment,
    start: int,
    numel: int,
    device: Any = None,
) -> torch.Tensor:
    """Elements ``start`` to ``start + numel`` of a moment: a new flat fp32 tensor, on the state's
    device or ``device``.

    Decodes no more than the groups that hold them.
    """
    if group["moments"] == "fp32":
        return state[FP32_KEYS[which]].reshape(-1)[start : start + numel].clone()
    moments, first = _rows(state, group, start, numel)
    moments = moments if device is None else _on(device, moments)
    return _decode_moments(group, *moments)[MOMENTS.index(which)].narrow(0, start - first, numel)


def write_moment(
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    which: WhichMoment,
    start: int,
    values: torch.Tensor,
) -> None:
    """Replace elements from ``start`` on by ``values``, flat, rounded to nearest, on the device of
    ``values``.

    Elements that share a group with them are decoded and encoded again; no others change. Where
    first moments are normalized, those of the groups are encoded again with the second ones: from
    what was written since the last step, if anything was, so that either moment may be written
    first.
    """
    if group["moments"] == "fp32":
        state[FP32_KEYS[which]].view(-1)[start : start + values.numel()].copy_(values)
        return
    stored, first = _rows(state, group, start, values.numel())
    m, v = _on(values.device, stored)
    codec_m, codec_v = codecs(group)
    decoded = _decode_moments(group, m, v)
    if codec_m.over_root:
        written = _written.setdefault(state[CODE_KEYS[0]], {})
        if which == "first":
            written.pop(start, None)  # the latest is put in last
            written[start] = values.cpu()
        for at, x in written.items():
            low, high = max(at, first), min(at + x.numel(), first + decoded[0].numel())
            if low < high:
                decoded[0][low - first : high - first] = x[low - at : high - at].to(
                    decoded[0].device
                )
    decoded[MOMENTS.index(which)][start - first : start - first + values.numel()] = values
    if which == "second":
        v = encode(decoded[1], codec_v)
        stored[1].copy_(v)
    if which == "first" or codec_m.over_root:
        stored[0].copy_(_encode_first(group, decoded[0], v))


def _rows(
    state: Mapping[str, Any], group: Mapping[str, Any], start: int, numel: int
) -> tuple[tuple[Moment, Moment], int]:
    """Views of both moments of the groups that hold these elements, and the index of their first
    element.
    """
    size = group["group_size"]
    first, last = start // size, -(-(start + numel) // size)
    m, v = (Moment(*(tensor[first:last] for tensor in moment(state, which))) for which in MOMENTS)
    return (m, v), first * size


def _on(device: torch.device, moments: tuple[Moment, Moment]) -> tuple[Moment, Moment]:
    """Both moments on a device where they are decoded as a step there would: a CPU's rounding
    differs from a GPU's.
    """
    first, second = (Moment(*(t.to(device) for t in one)) for one in moments)
    return first, second
