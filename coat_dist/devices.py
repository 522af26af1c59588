"""What a GPU can do: run the kernels, and convert and multiply FP8 by instructions. Warned once
where it cannot.

==================  ================  ===================  =======================
compute capability  kernels           FP8 conversion       FP8 products
==================  ================  ===================  =======================
8.9 and above       yes               instructions         ``torch._scaled_mm``
8.0 to 8.8          yes               integer arithmetic,  BF16 products of the
                                      the same codes       codes
below, and AMD      no: definitions   torch's casts        fp64 sums
==================  ================  ===================  =======================

``COAT_FP8_ARITHMETIC=1`` in the environment takes any GPU for one of the second line: to test it,
and to measure what it costs, on a GPU that has the instructions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .ranks import rank_and_world

KERNEL_CAPABILITY = (8, 0)
"""Ampere is the first with BF16 conversion and with min and max that keep NaN."""
FP8_CAPABILITY = (8, 9)
"""Ada is the first with FP8 conversion and FP8 matrix products."""


# A layer looks some hundred times. Two variables that are not set take 11.6 us by `os.environ.get`,
# which encodes the name and raises and catches a KeyError, and 0.1 us by the dictionary that
# CPython 3.11 keeps behind it. Not its method `get` alone, which torch.compile cannot trace (2.11).
_environment: Mapping[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_NAMES = {
    name: os.environ.encodekey(name)
    for name in ("COAT_REFERENCE", "COAT_KERNELS", "COAT_FP8_ARITHMETIC")
}
_YES = os.environ.encodevalue("1")


def switched_on(name: str) -> bool:
    """Whether ``COAT_REFERENCE``, ``COAT_KERNELS`` or ``COAT_FP8_ARITHMETIC`` is "1" in the
    environment, now.
    """
    return _environment.get(_NAMES[name]) == _YES


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels run on the device of ``tensor``: CUDA, compute capability 8.0, Triton
    installed.
    """
    return tensor.is_cuda and _runs_kernels(tensor.get_device())


def has_fp8(tensor: torch.Tensor) -> bool:
    """Whether the device of ``tensor`` converts and multiplies FP8 by instructions. Each GPU of
    a machine is asked.
    """
    if not tensor.is_cuda:
        return False
    if switched_on("COAT_FP8_ARITHMETIC"):
        _say(tensor.get_device(), "COAT_FP8_ARITHMETIC=1", _ARITHMETIC)
        return False
    return _has_fp8(tensor.get_device())


_ARITHMETIC = (
    "FP8 by integer arithmetic, with the same codes; FP8 products as BF16 products "
    "(docs/support.md, GPUs)"
)
_DEFINITIONS = (
    "no kernels: every operation is its definition in plain torch, very slowly "
    "(docs/support.md, GPUs)"
)


@functools.cache
def _runs_kernels(device: int) -> bool:
    if torch.version.hip is not None:
        why = "AMD GPU"
    elif importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    elif torch.cuda.get_device_capability(device) < KERNEL_CAPABILITY:
        why = _below(device, KERNEL_CAPABILITY)
    else:
        return True
    _say(device, why, _DEFINITIONS)
    return False


@functools.cache
def _has_fp8(device: int) -> bool:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return True
    if _runs_kernels(device):  # otherwise _runs_kernels has warned
        _say(device, _below(device, FP8_CAPABILITY), _ARITHMETIC)
    return False


def _below(device: int, needed: tuple[int, int]) -> str:
    has = torch.cuda.get_device_capability(device)
    return f"compute capability {has[0]}.{has[1]}, below {needed[0]}.{needed[1]}"


@functools.cache
def _say(device: int, why: str, what: str) -> None:
    """Warn, once for each GPU of this process and on one rank: rank 0, and ranks whose GPU is of
    another kind than the first of their machine, which rank 0 does not know.
    """
    if torch.compiler.is_compiling():  # said by what is not compiled: the optimizer's step
        return
    rank = rank_and_world()[0] or int(os.environ.get("RANK") or 0)
    if rank == 0 or torch.cuda.get_device_capability(device) != torch.cuda.get_device_capability(0):
        warnings.warn(
            f"coat_dist: GPU {device} ({torch.cuda.get_device_name(device)}): {why}: {what}",
            stacklevel=2,
        )
