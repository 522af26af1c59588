"""The noise of stochastic rounding of moments, spread evenly over steps and elements.

Rounding errors that alternate do less to a moving average than those that do not: noise that visits
every eighth of (0, 1) once in eight steps halves the variance that rounding adds to a second moment
at beta2 = 0.95 (docs/numerics.md).
"""

from __future__ import annotations

import torch

_UINT32 = 0xFFFFFFFF
_GOLDEN = 0x4F1BBD
"""2**23 over the golden ratio, odd: numbers of 23 bits, as a fraction of fp32 has."""
_FIRST = 0x5BD1E995
"""Any number: makes another hash of a hash."""


def dither(
    seed: int,
    step: int,
    first: int,
    n: int,
    group_size: int,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform fp32 numbers [n] in (0, 1) for the first and the second moment of elements ``first``
    to ``first + n``.

    They are odd multiples of 2**-17, and spread evenly in two ways. Over an element's steps: in
    each block of eight (from one that is a multiple of eight) it visits each eighth of (0, 1) once.
    Over a group's elements: they are a Weyl sequence, multiples of the golden ratio. Where the
    sequence starts and in which order eighths are visited is random, by group and block.

    Counter-based: an element's noise depends on ``seed`` (uint32), step and index only. So results
    do not depend on chunking or device, checkpoints need no generator state, and the kernel
    reproduces them bit for bit. The mixing function is the multiply-xorshift "lowbias32" (C.
    Wellons, hash-prospector).

    ``first`` is a multiple of ``group_size``.
    """
    group = torch.arange(first // group_size, -(-(first + n) // group_size), device=device)
    start_v = _mix((group & _UINT32) ^ _mix((group >> 32) ^ ((seed + (step >> 3)) & _UINT32)))
    weyl = torch.arange(group_size, device=device) * _GOLDEN
    found = []
    for start in (_mix(start_v ^ _FIRST), start_v):
        visited = start + ((step & 7) * (start & 6 | 1) << 20)
        bits = (visited[:, None] + weyl >> 7) & 0xFFFF
        found.append(((bits.float() + 0.5) * 2.0**-16).view(-1)[:n])
    return found[0], found[1]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective hash of uint32 values held as int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _UINT32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _UINT32  # wraps in int64, the low 32 bits are right
    return x ^ (x >> 16)
