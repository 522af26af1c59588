"""Formats of AdamW moments: one small class for each, looked up by name in :data:`MOMENT_FORMATS`.

``reference/moments.py`` says what a group is and does what all formats have in common: amax, zeros,
filling. A format says how 8-bit codes are spaced between the group's smallest and largest
magnitude:

* ``exponents``: the group's ``k``, fp32, whole numbers from 1 to 255. ``spread`` is log2 of the
  largest over the smallest non-zero magnitude; -inf for zeros, NaN if not finite. ``k_numerator``
  is ``unit * log2_range``, which benchmarks vary;
* ``spaced``: where magnitudes with ``log_ratio = log2(|x| / a)`` lie among the codes, before they
  are rounded;
* ``codes``: the rounding of these positions ``y``, and the bytes that are stored, uint8. The
  elements ``x`` give the signs. ``noise``, uniform in [0, 1), rounds stochastically; None rounds to
  nearest, ties to even. With ``keep_nonzero`` no magnitude from TINY up becomes code zero;
* ``read``: the inverse of these three. Of stored codes, a number of their sign that is zero where
  they mean zero, and log2 of their magnitude over a (-inf where they mean zero).

Tensors of a group's elements are fp32 [groups, group_size], those of a group [groups].
``kernels/moment_formats.py`` has the same four for each format under the same names. The names that
users give are listed in ``coat_dist/formats.py``.
"""

from __future__ import annotations

import math

import torch

from ..formats import E4M3, E5M2, FP8Format

TINY = 2.0**-126
"""Smallest normal fp32: magnitudes below it are stored as zero."""
LOG8_UNIT = 250.0
"""Steps of k in an octave."""
LOG8_SPAN = 253.75
"""Code steps that a group's spread takes at most."""


class _Format:
    """How codes are spaced."""

    name: str
    """As users give it."""
    max: float
    """What a group's amax is encoded as."""
    unit: float
    """k that stands for a power of one; where spacing is logarithmic, for steps of one octave."""
    log2_range: float | None = None
    """log2 of R, the ratio of largest to smallest magnitude that the format keeps; None: it
    follows the group.
    """
    finer: int = 1
    """1 where a larger k means a finer grid, which reaches less far; -1 where a smaller one
    does.
    """
    k_of_zeros: int = 255
    """k of a group of zeros, with expansion."""


class _PowerFormat(_Format):
    """Codes of ``max * (|x| / a) ** (k / unit)``: dynamic range expansion (COAT, arXiv
    2410.19313, section 4).
    """

    log2_range: float
    dtype: torch.dtype
    """Of codes."""

    def exponents(self, spread: torch.Tensor, k_numerator: float) -> torch.Tensor:
        return torch.where(spread > 0, torch.floor(k_numerator / spread), 255.0).clamp(1.0, 255.0)

    def spaced(self, log_ratio: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.max * torch.exp2((log_ratio * (k / self.unit)[:, None]).clamp(max=0.0))

    def read(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = q.view(self.dtype).float()
        return code, torch.log2(code.abs() / self.max) * (self.unit / k[:, None])


class FP8Moments(_PowerFormat):
    """The number that a power is rounded to in an FP8 format."""

    unit = 16.0

    def __init__(self, fp8: FP8Format) -> None:
        self.fp8, self.name, self.max, self.dtype = fp8, fp8.name, fp8.max, fp8.dtype
        self.log2_range = math.log2(fp8.max**2 / 2.0)

    def codes(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        k: torch.Tensor,
        noise: torch.Tensor | None,
        keep_nonzero: bool,
    ) -> torch.Tensor:
        y = y if noise is None else _round_stochastically(y, self.fp8, noise)
        q = y.to(self.dtype).view(torch.uint8)
        if keep_nonzero:
            q = torch.where((q == 0) & (x.abs() >= TINY), 1, q)
        return q | (x.signbit().to(torch.uint8) << 7)


class Int8Moments(_PowerFormat):
    """A power rounded to an integer, in two's complement: equally spaced, best at a group's
    large values.
    """

    name, max, unit, log2_range, dtype = "int8", 127.0, 64.0, 5.0, torch.int8

    def codes(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        k: torch.Tensor,
        noise: torch.Tensor | None,
        keep_nonzero: bool,
    ) -> torch.Tensor:
        rounded = torch.copysign(torch.round(y) if noise is None else torch.floor(y + noise), x)
        return rounded.nan_to_num(0.0).to(self.dtype).view(torch.uint8)


class Log8Moments(_Format):
    """255 magnitudes, equally spaced in their logarithm; no sign. k is the spacing, in 1/250
    octaves.
    """

    name, max, unit, finer, k_of_zeros = "log8", 255.0, LOG8_UNIT, -1, 1

    def exponents(self, spread: torch.Tensor, k_numerator: float) -> torch.Tensor:
        return torch.where(spread > 0, torch.ceil(spread * (LOG8_UNIT / LOG8_SPAN)), 1.0).clamp(
            1.0, 255.0
        )

    def spaced(self, log_ratio: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (255.0 + log_ratio * (LOG8_UNIT / k)[:, None]).clamp(0.0, 255.0)

    def codes(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        k: torch.Tensor,
        noise: torch.Tensor | None,
        keep_nonzero: bool,
    ) -> torch.Tensor:
        rounded = torch.round(y) if noise is None else _round_logarithm(y, k / LOG8_UNIT, noise)
        return rounded.nan_to_num(0.0).to(torch.uint8)  # a is NaN then

    def read(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = q.float()
        return code, torch.where(code > 0, (code - 255.0) * (k[:, None] / LOG8_UNIT), -torch.inf)


MomentFormat = FP8Moments | Int8Moments | Log8Moments
MOMENT_FORMATS: dict[str, MomentFormat] = {
    f.name: f for f in (FP8Moments(E4M3), FP8Moments(E5M2), Int8Moments(), Log8Moments())
}


def _round_stochastically(y: torch.Tensor, fp8: FP8Format, noise: torch.Tensor) -> torch.Tensor:
    """One of the two neighbours of 0 <= y <= F in the format: the upper with the probability
    that keeps the mean.
    """
    # Of the format's smallest normal value: below it, values are equally spaced.
    lowest = 127 + round(math.log2(fp8.smallest)) + fp8.mantissa_bits
    exponent = (y.view(torch.int32) >> 23).clamp(min=lowest)
    step = ((exponent - fp8.mantissa_bits) << 23).view(torch.float32)
    return torch.where(y.isfinite(), torch.floor(y / step + noise) * step, y)


def _round_logarithm(y: torch.Tensor, step: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One of the two integers next to y: the upper with the probability that keeps the mean of 2
    ** (step * result).
    """
    lower = torch.floor(y)
    octaves = math.log(2.0) * step[:, None]
    upper = torch.expm1((y - lower) * octaves) / torch.expm1(octaves)
    return lower + torch.floor(upper + noise)
