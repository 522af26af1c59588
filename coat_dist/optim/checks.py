"""Checks that a step makes before it changes anything: sizes, types, devices and layouts of its
tensors.

A kernel gets addresses: with a tensor that is smaller than it should be, of another type or on
another device, it would read and write memory of others. A parameter that fits, as nearly all do,
takes a few microseconds of host time: integers and types are compared, no tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ops.dispatch import use_kernels
from .seeds import name_of
from .sharded import is_dtensor, local, refusal
from .state import (
    DTYPES,
    check_master,
    check_state,
    has_remainder,
    is_count,
    state_layout,
    tensors_of,
)

__all__ = ["Pairs", "check_capturable", "check_capture", "check_step"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Parameters of a group that have a gradient, each with it."""

_COPIED = (torch.bfloat16, torch.float16)


_NO_KERNELS = (
    "for a parameter on {}, accepted: True for parameters on a CUDA GPU, whose step runs "
    "in kernels; False elsewhere"
)


def check_capturable(group: Mapping[str, Any]) -> None:
    """Raise ValueError where a new group cannot be ``capturable``."""
    for p in tensors_of(group) if group["capturable"] else ():
        if p.device.type == "cpu" and not use_kernels(p):
            raise ValueError(f"CoatAdamW capturable: got True {_NO_KERNELS.format(p.device)}")


def check_capture(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise RuntimeError, as torch's optimizers do, where a CUDA graph would keep the numbers of
    one step forever.
    """
    fixed = not all(group.get("capturable") for group in groups)
    if fixed and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "CoatAdamW.step: capturable: got False in a parameter group while a CUDA graph is "
            "captured, accepted: True "
            "in all groups; the graph would repeat the step's number, and with it bias correction "
            "and noise"
        )


def check_step(
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[torch.Tensor, Mapping[str, Any]],
    todo: Sequence[Pairs],
    copies: Mapping[torch.Tensor, torch.Tensor],
    factor: torch.Tensor | None,
) -> None:
    """Check all tensors of a step against one another; ``todo`` has one entry a group.

    Raises:
        TypeError: a gradient or parameter of a type that is not supported.
        ValueError: sizes, devices or layouts do not fit. Both name the group and the parameter.
    """
    if factor is not None and (factor.dtype != torch.float32 or factor.numel() != 1):
        raise ValueError(
            f"CoatAdamW grad_factor: got {_given(factor)}, accepted: one torch.float32 element"
        )
    for i, (group, pairs) in enumerate(zip(groups, todo, strict=True)):
        for p, grad in pairs:
            shape, device, state = p.shape, p.device, states.get(p)
            if not (  # not an error yet: it takes a closer look
                state
                and grad.shape == shape
                and grad.dtype in DTYPES
                and p.dtype in DTYPES
                and grad.device == device
                and grad.layout is torch.strided
                and p.is_contiguous()
                and _state_fits(state, group, p.numel(), shape)
                and (factor is None or factor.device == device)
                and not (
                    copies
                    and p in copies
                    or is_dtensor(p)
                    or is_dtensor(grad)
                    or "coat_p_low" in state
                )
                and not group.get("capturable")
            ):
                _look_closely(p, grad, state or {}, group, copies.get(p), factor, i)


def _state_fits(
    state: Mapping[str, Any], group: Mapping[str, Any], n: int, shape: torch.Size
) -> bool:
    """Whether a state has what its group says of n elements. ``to_home`` has brought it where it
    is kept.
    """
    if not is_count(state.get("step")):
        return False
    if has_remainder(group) != ("coat_p_low" in state):
        return False
    for key, wanted, dtype in state_layout(group, n, shape):
        t = state.get(key)
        if t is None or t.shape != wanted or t.dtype is not dtype or t.is_meta:
            return False
        if not t.is_contiguous() and (key.startswith("coat_") or _overlaps(t)):
            return False
    return True


def _look_closely(
    p: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    copy: torch.Tensor | None,
    factor: torch.Tensor | None,
    i: int,
) -> None:
    """Raise what is wrong with a parameter, if anything is."""

    def what() -> str:
        j = next(j for j, other in enumerate(group["params"]) if other is p)
        name = name_of(group, j)
        return (
            f"CoatAdamW.step: group {i}, parameter {j}{f' ({name})' if name else ''}, of shape "
            f"{tuple(p.shape)}"
        )

    mine = local(p)
    accepted = "accepted: dense float32, bfloat16 or float16"
    if p.dtype not in DTYPES or p.layout is not torch.strided:
        raise TypeError(f"{what()}: got a {p.layout} {p.dtype} parameter, {accepted}")
    if grad.layout is not torch.strided or grad.dtype not in DTYPES:
        raise TypeError(f"{what()}: got a {grad.layout} {grad.dtype} gradient, {accepted}")
    if is_dtensor(grad) and not is_dtensor(p):
        raise TypeError(
            f"{what()}: got a DTensor as gradient of a plain parameter, accepted: a plain tensor"
        )
    shape = p.shape if is_dtensor(grad) else mine.shape
    if grad.shape != shape or grad.device != p.device:
        raise ValueError(
            f"{what()}: got a gradient {_given(grad)} on {grad.device}, accepted: {list(shape)} on "
            f"{p.device}, as the "
            "parameter is now"
        )
    if _overlaps(mine):
        raise ValueError(
            f"{what()}: got a parameter of strides {mine.stride()}, accepted: elements that do not "
            "overlap in memory"
        )
    check_master(p, group)
    if group.get("capturable") and not use_kernels(mine):
        raise ValueError(f"{what()}: capturable: got True {_NO_KERNELS.format(p.device)}")
    if factor is not None and factor.device != p.device:
        raise ValueError(
            f"CoatAdamW grad_factor: got one on {factor.device}, accepted: {p.device}, as the "
            "gradients"
        )
    if copy is not None:
        fits = copy.numel() == p.numel() and copy.device == p.device and copy.dtype in _COPIED
        if not fits or _overlaps(copy) or is_dtensor(p):
            raise ValueError(
                f"{what()}: got a copy {_given(copy)} on {copy.device}, accepted: bfloat16 or "
                f"float16, {p.numel()} "
                f"elements that do not overlap in memory, on {p.device}; none of a DTensor"
            )
    if "step" not in state:  # DeepSpeed may have put an empty dict there
        if reason := refusal(p):  # wrapped by FSDP1 after the optimizer was built
            raise TypeError(f"CoatAdamW params: got {reason}")
        return
    if _state_fits(state, group, mine.numel(), p.shape):
        return
    check_state(state, p, group, f"{what()}: state")
    for key in (
        key for key, value in state.items() if isinstance(value, torch.Tensor) and key != "step"
    ):
        value = local(state[key])
        if value.is_meta or not (
            value.is_contiguous() if key.startswith("coat_") else not _overlaps(value)
        ):
            given = f"got strides {value.stride()} on {value.device}"
            raise ValueError(f"{what()}: state, {key}: {given}, accepted: contiguous, with data")


def _given(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements are one in memory, as of an expanded tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not tensor.is_contiguous() and any(stride == 0 for n, stride in sizes if n > 1)
