"""Kernel or definition: the one place that decides."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from ..formats import QuantizedTensor

__all__ = ["operation", "use_kernels"]


def use_kernels(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` runs its Triton kernel; otherwise it runs the definition in ``reference``.

    Kernels need a CUDA device with FP8 conversion instructions (compute capability 8.9) and Triton. The environment
    decides otherwise: ``COAT_REFERENCE=1`` takes the definitions everywhere, ``COAT_KERNELS=1`` the kernels everywhere
    (on CPU they then need Triton's interpreter, ``TRITON_INTERPRET=1``).
    """
    if _environment(_REFERENCE) == _YES:
        return False
    return (tensor.is_cuda and _capable(tensor.get_device())) or _environment(_KERNELS) == _YES


def _lookup() -> tuple[Callable[[Any], Any], Any, Any, Any]:
    """How to look a variable up, the names of both, and "1".

    A layer looks some fifty times, which takes 1 us from ``os.environ`` and a tenth from what CPython keeps behind it.
    """
    inner, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if isinstance(inner, dict) and encode is not None:
        return inner.get, encode("COAT_REFERENCE"), encode("COAT_KERNELS"), os.environ.encodevalue("1")
    return os.environ.get, "COAT_REFERENCE", "COAT_KERNELS", "1"


_environment, _REFERENCE, _KERNELS, _YES = _lookup()


@functools.cache
def _capable(device: int) -> bool:
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
        and importlib.util.find_spec("triton") is not None
    )


def operation(definition: Callable[..., Any]) -> Callable[..., Any]:
    """The operation that ``definition`` defines: its kernel where the first argument's device calls for one.

    The kernel is the function of the same name in the module of the same name under ``kernels``.
    """
    module = f"coat_dist.kernels.{definition.__module__.rpartition('.')[2]}"

    @functools.cache
    def kernel() -> Callable[..., Any]:  # imported late: needs triton, which a machine without a GPU may lack
        return getattr(importlib.import_module(module), definition.__name__)

    @functools.wraps(definition)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = kernel() if use_kernels(first.codes if isinstance(first, QuantizedTensor) else first) else definition
        return chosen(first, *args, **kwargs)

    return call
