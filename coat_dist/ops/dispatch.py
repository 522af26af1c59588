"""Kernel or definition: the one place that decides."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ..devices import runs_kernels, switched_on
from ..formats import QuantizedTensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def use_kernels(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` runs its Triton kernel; otherwise it runs the definition
    in ``reference``.

    Kernels need a CUDA device of compute capability 8.0 and Triton (``coat_dist/devices.py``). The
    environment decides otherwise: ``COAT_REFERENCE=1`` takes the definitions everywhere,
    ``COAT_KERNELS=1`` the kernels everywhere (on CPU they then need Triton's interpreter,
    ``TRITON_INTERPRET=1``).
    """
    if switched_on("COAT_REFERENCE"):
        return False
    return runs_kernels(tensor) or switched_on("COAT_KERNELS")


def operation(definition: Callable[_P, _R]) -> Callable[_P, _R]:
    """The operation that ``definition`` defines: its kernel where the first argument's device calls
    for one.

    The first argument is a tensor, a quantized one, or a list, not empty, of tuples with a
    ``param`` on one device. The kernel is the function of the same name, with the same arguments,
    in the module of the same name under ``kernels``.
    """
    module = f"coat_dist.kernels.{definition.__module__.rpartition('.')[2]}"

    @functools.cache
    def kernel() -> Callable[..., Any]:
        # When it is first needed: its module needs triton, which a machine without a GPU may lack.
        return getattr(importlib.import_module(module), definition.__name__)

    @functools.wraps(definition)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = first
        if not isinstance(first, torch.Tensor):
            tensor = first.codes if isinstance(first, QuantizedTensor) else first[0].param
        return (kernel() if use_kernels(tensor) else definition)(first, *args, **kwargs)

    return cast(Callable[_P, _R], call)
