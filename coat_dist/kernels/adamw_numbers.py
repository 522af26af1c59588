"""The numbers of a step as AdamW kernels take them; and what depends on the step's number, computed
on the device: for steps inside a CUDA graph, which counts them there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.adamw import AdamWStep
from .launch import fast_launch
from .moment_formats import Constants


class Step(NamedTuple):
    """A step as compile-time constants."""

    lr_is_tensor: bool
    scaled: bool
    """There is a ``grad_factor``."""
    maximize: bool
    stochastic_m: bool
    stochastic_v: bool
    counted: bool
    """The step's number is on the device."""
    group: int = 1
    """Elements of a group of FP8 moments; a tile has ``rows`` groups."""
    rows: int = 1
    m: Constants | None = None
    v: Constants | None = None


def step_constants(numbers: AdamWStep, counted: bool, *codecs: Any) -> Step:
    """:class:`Step`; ``codecs`` are its last four fields."""
    return Step(
        isinstance(numbers.lr, torch.Tensor),
        numbers.grad_factor is not None,
        numbers.maximize,
        *numbers.stochastic,
        counted,
        *codecs,
    )


def step_scalars(numbers: AdamWStep, unused: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of a kernel, from grad_factor to inverse_sqrt_bias2. A kernel computes decay from a
    learning rate that is a tensor; ``unused`` stands for a grad_factor that is not there.
    """
    lr, grad_factor = numbers.lr, numbers.grad_factor
    return (
        unused if grad_factor is None else grad_factor,
        lr,
        0.0 if isinstance(lr, torch.Tensor) else 1.0 - lr * numbers.weight_decay,
        numbers.weight_decay,
        numbers.beta1,
        1.0 - numbers.beta1,
        numbers.beta2,
        1.0 - numbers.beta2,
        numbers.eps,
        numbers.inverse_bias1,
        numbers.inverse_sqrt_bias2,
    )


@triton.jit
def next_moments(g, m, v, grad_factor, beta1, rest1, beta2, rest2, STEP: tl.constexpr):
    """Both moments after a gradient, in fp32."""
    if STEP.scaled:
        g = g * tl.load(grad_factor)
    if STEP.maximize:
        g = -g
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    return m, v


@triton.jit
def load_numbers(of_count):
    """What :func:`numbers_of_counts` gives for one count: lr times the second, 1 / (1 - beta1**t),
    1 / sqrt(1 - beta2**t), t."""
    count = tl.load(of_count + 3).to(tl.int32)
    return tl.load(of_count), tl.load(of_count + 1), tl.load(of_count + 2), count


@triton.jit
def _power(base, exponent):
    """``reference/adamw.py`` has the same, to the bit."""
    result = base * 0.0 + 1.0
    for _ in range(32):
        result = tl.where(exponent & 1 != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@fast_launch
@triton.jit(do_not_specialize=["lr", "beta1", "beta2"])
def _numbers_kernel(counts, out, lr, beta1, beta2):
    """fp64 throughout, as on the host, and rounded once; ``lr`` and the betas are the bits of
    fp64 numbers.
    """
    count = tl.load(counts + tl.program_id(0))
    t = count.to(tl.int32)
    out += tl.program_id(0) * 4
    inverse_bias1 = 1.0 / (1.0 - _power(beta1.to(tl.int64).to(tl.float64, bitcast=True), t))
    inverse_sqrt_bias2 = 1.0 / tl.sqrt(
        1.0 - _power(beta2.to(tl.int64).to(tl.float64, bitcast=True), t)
    )
    tl.store(out, (lr.to(tl.int64).to(tl.float64, bitcast=True) * inverse_bias1).to(tl.float32))
    tl.store(out + 1, inverse_bias1.to(tl.float32))
    tl.store(out + 2, inverse_sqrt_bias2.to(tl.float32))
    tl.store(out + 3, count)


def numbers_of_counts(counts: Sequence[Any], numbers: AdamWStep) -> torch.Tensor:
    """fp32 [counts, 4] on the device of ``counts``, which are fp32 scalars; see
    :func:`load_numbers`.

    The bits are those of the same numbers computed on the host (:class:`AdamWStep`). With a
    learning rate that is a tensor the first is nothing.
    """
    together = torch.stack(list(counts))
    out = together.new_empty(len(together), 4)
    lr = 0.0 if isinstance(numbers.lr, torch.Tensor) else numbers.lr
    _numbers_kernel[(len(together),)](
        together, out, *map(_bits, (lr, numbers.beta1, numbers.beta2)), num_warps=1
    )
    return out


def _bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]
