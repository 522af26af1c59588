"""Checks that a step makes before it changes anything: sizes, types, devices and layouts of its
tensors.

A kernel gets addresses: with a tensor that is smaller than it should be, of another type or on
another device, it would read and write memory of others. Integers and types are compared, no tensor
is read. A step whose tensors are those of an earlier one is not checked again (``plan.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ops.dispatch import use_kernels
from .seeds import name_of
from .sharded import is_dtensor, local
from .state import DTYPES, check_parameter, check_state

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Parameters of a group that have a gradient, each with it."""

_COPIED = (torch.bfloat16, torch.float16)


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
            try:
                _check(p, grad, states.get(p) or {}, group, copies.get(p), factor)
            except (TypeError, ValueError) as error:
                j = next(j for j, other in enumerate(group["params"]) if other is p)
                name = name_of(group, j)
                raise type(error)(
                    f"CoatAdamW.step: group {i}, parameter {j}{f' ({name})' if name else ''}, of "
                    f"shape {tuple(p.shape)}: {error}"
                ) from None


def _check(
    p: torch.Tensor,
    grad: torch.Tensor,
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    copy: torch.Tensor | None,
    factor: torch.Tensor | None,
) -> None:
    """Raise what is wrong with a parameter, if anything is."""
    check_parameter(p, group)
    mine = local(p)
    if grad.layout is not torch.strided or grad.dtype not in DTYPES:
        raise TypeError(
            f"got a {grad.layout} {grad.dtype} gradient, accepted: dense float32, "
            "bfloat16 or float16"
        )
    shape = p.shape if is_dtensor(grad) else mine.shape
    if grad.shape != shape or grad.device != p.device:
        raise ValueError(
            f"got a gradient {_given(grad)} on {grad.device}, accepted: {list(shape)} on "
            f"{p.device}, as the parameter is now"
        )
    if group.get("capturable") and not use_kernels(mine):
        raise ValueError(
            f"capturable: got True for a parameter on {p.device}, accepted: True for "
            "parameters on a CUDA GPU, whose step runs in kernels; False elsewhere"
        )
    if factor is not None and factor.device != p.device:
        raise ValueError(
            f"CoatAdamW grad_factor: got one on {factor.device}, accepted: {p.device}, as the "
            "gradients"
        )
    if copy is not None:
        fits = copy.numel() == p.numel() and copy.device == p.device and copy.dtype in _COPIED
        if not fits or not copy.is_contiguous() or is_dtensor(p):
            raise ValueError(
                f"got a copy {_given(copy)} on {copy.device}, accepted: contiguous bfloat16 or "
                f"float16, {p.numel()} elements on {p.device}; none of a DTensor"
            )
    if "step" not in state:  # DeepSpeed may have put an empty dict there
        return
    check_state(state, p, group, "state")
    for key, value in state.items():
        coded = key.startswith("coat_") and isinstance(value, torch.Tensor)
        if coded and (value.is_meta or not value.is_contiguous()):  # a kernel gets its address
            raise ValueError(
                f"state, {key}: got strides {value.stride()} on {value.device}, "
                "accepted: contiguous, with data"
            )


def _given(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
