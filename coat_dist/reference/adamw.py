"""One AdamW step on a tensor, with moments in FP8 or fp32.

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr * weight_decay) - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

m is the first moment and v the second, g the gradient, p the parameter. Weight decay is decoupled
(Loshchilov & Hutter, arXiv 1711.05101). All arithmetic is fp32. With FP8 moments the update uses
the new m and v before they are encoded, so their rounding first acts in the next step (COAT, arXiv
2410.19313, section 4).

A bfloat16 parameter may come with the remainder of its rounding, ``low``: the two are an fp32
master weight, to the bit (``reference/master.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .dither import dither
from .master import join, split
from .moments import Moment, MomentCodec, decode, encode

_CHUNK = 1 << 20
"""Elements decoded at a time: temporaries take some 40 bytes for each of these, whatever the
size of the tensor.
"""


@dataclass(frozen=True)
class AdamWStep:
    """The numbers of one step. ``step`` counts from 1. ``lr`` may be a 0-d tensor on the
    parameter's device.
    """

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False
    grad_factor: torch.Tensor | None = None
    """fp32 scalar on the parameter's device; gradients are multiplied by it first."""
    stochastic: tuple[bool, bool] = (True, True)
    """Whether the first and the second moment of tensors that have a seed are rounded with it."""

    @cached_property
    def inverse_bias1(self) -> float:
        """1 / (1 - beta1**t)."""
        return 1.0 / (1.0 - power(self.beta1, self.step))

    @cached_property
    def inverse_sqrt_bias2(self) -> float:
        """1 / sqrt(1 - beta2**t)."""
        return 1.0 / math.sqrt(1.0 - power(self.beta2, self.step))


def power(base: float, exponent: int) -> float:
    """base**exponent by squaring, in fp64: multiplications alone, so that a kernel gets the same
    bits.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class AdamWTensors(NamedTuple):
    """What one parameter of n elements brings to :func:`adamw_steps`; all tensors are
    contiguous.
    """

    param: torch.Tensor
    """fp32, bfloat16 or float16. Its new value is rounded to nearest."""
    grad: torch.Tensor
    """fp32, bfloat16 or float16; not changed."""
    first_moment: Moment
    second_moment: Moment
    seed: int | None = None
    """uint32: codes of the moments that ``AdamWStep.stochastic`` names are rounded stochastically
    by :func:`~coat_dist.reference.dither.dither`; all are rounded to nearest without.
    """
    low: torch.Tensor | None = None
    """int16; with a bfloat16 ``param`` it holds the master weight that is updated, and ``param`` is
    its upper half, rounded as ``reference/master.py`` says.
    """
    copy: torch.Tensor | None = None
    """bfloat16 or float16; receives the new parameter, rounded from fp32 to nearest even."""
    step_count: torch.Tensor | None = None
    """fp32 scalar on the parameter's device: the step, in place of that of :class:`AdamWStep`."""
    base_row: int = 0
    """Of a part of a parameter, from a multiple of 16 groups on: the groups before it, by which
    noise is numbered.
    """


class FP32Tensors(NamedTuple):
    """What one parameter brings to :func:`adamw_fp32_steps`; see :func:`adamw_fp32_step`."""

    param: torch.Tensor
    grad: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor
    low: torch.Tensor | None = None
    copy: torch.Tensor | None = None
    step_count: torch.Tensor | None = None


def adamw_step(
    one: AdamWTensors, codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
) -> None:
    """Update parameter and moments, and where given ``low`` and ``copy``, in place. Both codecs
    have the same group size.
    """
    size = codec_m.group_size
    param, grad = one.param.view(-1), one.grad.view(-1)
    low, copy = (None if t is None else t.view(-1) for t in (one.low, one.copy))
    for first in range(0, param.numel(), _CHUNK):
        last = min(first + _CHUNK, param.numel())
        rows = slice(first // size, codec_m.groups(last))
        old_m, old_v = (
            Moment(*(t[rows] for t in moment)) for moment in (one.first_moment, one.second_moment)
        )
        new_v = decode(old_v, codec_v, last - first)
        new_m = decode(old_m, codec_m, last - first, new_v if codec_m.over_root else None)
        low_, copy_ = (None if t is None else t[first:last] for t in (low, copy))
        part = FP32Tensors(param[first:last], grad[first:last], new_m, new_v, low_, copy_)
        adamw_fp32_step(part, numbers)
        noise: tuple = (None, None)
        if one.seed is not None:
            begin = first + one.base_row * size
            noise = dither(one.seed, numbers.step, begin, last - first, size, param.device)
        noise_m, noise_v = (
            u if wanted else None for u, wanted in zip(noise, numbers.stochastic, strict=True)
        )
        old_m.copy_(encode(new_m, codec_m, noise_m, new_v if codec_m.over_root else None))
        old_v.copy_(encode(new_v, codec_v, noise_v, before=old_v if codec_v.keep_grid else None))


def adamw_fp32_step(one: FP32Tensors, numbers: AdamWStep) -> None:
    """Update a parameter (fp32, bfloat16 or float16) and its fp32 moments of the same shape in
    place.

    ``low`` and ``copy`` are in the order of the parameter's elements by index. The others may have
    any strides: the bits are those of contiguous tensors, as torch may round the last bit of other
    ones otherwise.
    """
    low, copy = one.low, one.copy
    given = one.param, one.first_moment, one.second_moment
    param, m, v = (t.contiguous() for t in given)
    g = one.grad.contiguous().float()
    if numbers.grad_factor is not None:
        g = g * numbers.grad_factor
    if numbers.maximize:
        g = -g
    m.mul_(numbers.beta1).add_(g, alpha=1.0 - numbers.beta1)
    v.mul_(numbers.beta2).addcmul_(g, g, value=1.0 - numbers.beta2)
    update = (m * numbers.inverse_bias1).div_(
        (v.sqrt().mul_(numbers.inverse_sqrt_bias2)).add_(numbers.eps)
    )
    master = param.float() if low is None else join(param, low.view(param.shape))
    master = master * (1.0 - numbers.lr * numbers.weight_decay) - numbers.lr * update
    if copy is not None:
        copy.view(param.shape).copy_(master)
    if low is not None:
        master, rest = split(master)
        low.view(param.shape).copy_(rest)
    param.copy_(master)
    for target, dense in zip(given, (param, m, v), strict=True):
        if dense is not target:
            target.copy_(dense)


def adamw_steps(
    tensors: Sequence[AdamWTensors], codec_m: MomentCodec, codec_v: MomentCodec, numbers: AdamWStep
) -> None:
    """:func:`adamw_step` on many tensors of one device. Reads counts that are tensors on the
    host.
    """
    for one in tensors:
        adamw_step(one, codec_m, codec_v, _counted(numbers, one.step_count))


def adamw_fp32_steps(tensors: Sequence[FP32Tensors], numbers: AdamWStep) -> None:
    """:func:`adamw_fp32_step` on many tensors of one device. Reads counts that are tensors on
    the host.
    """
    for one in tensors:
        adamw_fp32_step(one, _counted(numbers, one.step_count))


def _counted(numbers: AdamWStep, count: torch.Tensor | None) -> AdamWStep:
    """The numbers of the step that ``count`` says; None: as they are."""
    return numbers if count is None else replace(numbers, step=int(count))
