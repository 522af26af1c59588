"""Kernel or definition: the one place that decides."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["use_kernels"]


def use_kernels(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` runs its Triton kernel; otherwise it runs the definition in ``reference``.

    Kernels need a CUDA device with FP8 conversion instructions (compute capability 8.9) and Triton. The environment
    decides otherwise: ``COAT_REFERENCE=1`` takes the definitions everywhere, ``COAT_KERNELS=1`` the kernels everywhere
    (on CPU they then need Triton's interpreter, ``TRITON_INTERPRET=1``).
    """
    if os.environ.get("COAT_REFERENCE") == "1":
        return False
    return os.environ.get("COAT_KERNELS") == "1" or (tensor.is_cuda and _capable(tensor.device))


@functools.cache
def _capable(device: torch.device) -> bool:
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
        and importlib.util.find_spec("triton") is not None
    )
