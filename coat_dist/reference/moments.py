"""AdamW moments in 8 bits: 128 codes, one amax and one exponent a group.

A group is ``group_size`` consecutive elements of the flat tensor. It is stored as

* ``a``: max|x| in bfloat16, rounded **up**, so that |x| / a never exceeds one (but for errors of
  arithmetic, below 2**-17);
* ``k``: how codes are spaced in this group, uint8, 1 to 255;
* ``q``: one 8-bit code an element.

Each format is a class in ``reference/moment_formats.py``; this file has what they have in common.

==============  ======  =================================================
format          moment  code, and what it is read back as
==============  ======  =================================================
"e4m3", "e5m2"  both    ``sign(x) * round_fp8(F * (|x| / a) ** (k / 16))``,
                        ``a * (|q| / F) ** (16 / k)``
"int8"          first   ``sign(x) * round(127 * (|x| / a) ** (k / 64))``,
                        ``a * (|q| / 127) ** (64 / k)``
"log8"          second  ``round(255 + log2(x / a) * 250 / k)``, 1 to 255,
                        ``a * 2 ** ((q - 255) * k / 250)``
==============  ======  =================================================

(F is the FP8 format's largest value; int8 codes are in two's complement; what is read back takes
the sign of q; code 0 is zero.) The first two rows are dynamic range expansion (COAT, arXiv
2410.19313, section 4), in 3 bytes of metadata a group. The exponent makes the group's ratio of
largest to smallest non-zero magnitude fill the range R that the format keeps::

    k = floor(unit * log2(R) / log2(a / b)) clamped to [1, 255]
    b = the smallest non-zero |x|, unit = 16 or 64

A larger R means a finer grid, and less room below the smallest element. R = F**2 / 2, as in COAT,
puts b at F / R = 2 / F, 2.3 steps of the subnormal grid in both FP8 formats; R = 2**5 puts it at
3.97 steps of int8, whose equally spaced codes are best at large values anyway. So neither kind of
rounding turns b into zero, and rounding to nearest may lower it as well as lift it. FP8 has more
range than most groups of moments have spread, so k is mostly above one and the grid becomes finer
than plain FP8; where the spread is larger, k below one compresses it. k = 1/16 reaches ratios of
2**265 and k = 1/64 of 2**320; fp32's normal numbers and a, at most bfloat16's maximum, are within
2**254.

**The first moment over the root of the second** (``over_root``). What a step uses of m is m /
sqrt(v), and that is what is encoded: ``r = m / max(sqrt(v), 2**-63)`` with the v of the step before
it is encoded itself. m is read back as r times the root of the decoded v, so what v's rounding does
to sqrt(v) it does to m, and m / sqrt(v) keeps the error of r alone. An element whose gradients stop
has a ratio that vanishes, whatever the sizes of its neighbours; by itself, its m would be the
smallest of its group for ever, at the coarse end of the grid. And small ratios matter little, so no
group is taken for wider than RATIO_SPAN = 8 octaves: what is below may become zero.

**Grids that stay** (``keep_grid``). Each new a or k rounds all elements of a group anew. A moment
that moves by less than a code step at a time, as v does, then has the noise of these roundings and
not of its own. So a group keeps the a and the k that it had while they serve: a is not below max|x|
nor above it by more than half an octave, and k no more than ``1 + k / 16`` away from the one that
would be chosen, on the side of the coarser grid. A new a has a quarter of an octave of headroom (in
fp32's bits, where mantissas are taken for parts of an octave).

"log8" spends no bit on a sign: 255 magnitudes, equally spaced in their logarithm. k is the spacing,
in 1/250 octaves::

    k = ceil(250 * log2(a / b) / 253.75) clamped to [1, 255]

which puts b at 1.25 steps or more above code 0, out of reach of rounding, and reaches ratios of
2**258.

What holds for every input, and is tested:

* Finite input decodes to finite values: constant groups (k clamps), tails of one element, zeros
  anywhere, groups of nothing but zeros (a = 0), values next to fp32's maximum (a stops at
  bfloat16's).
* Zero decodes to zero. With expansion, magnitudes from 2**-126 up (not ratios) have non-zero codes
  under either kind of rounding. With ``keep_nonzero``, which the second moment needs because it is
  divided by, they never become zero nor subnormal, with or without expansion.
* fp32 subnormals (below 2**-126) count as zero, as GPU arithmetic treats them.
* Infinity or NaN anywhere makes its whole group decode to NaN: it is never hidden.
* Error of one element, with y = F * (|x| / a) ** (k / unit), F = 127 for int8: ``|log2(decoded /
  |x|)| <= -log2(1 - d) * unit / k``, where d is half a step of the grid at y over y: 2**-(mantissa
  bits + 1) if y is a normal number of an FP8 format, smallest / (2 * y) if it is subnormal, 1 / (2
  * y) with int8. With log8 it is k / 500. Stochastic rounding doubles d, and k / 500.
* Stochastic rounding is unbiased in the stored value y; with log8 in the decoded value, because a
  moment that is unbiased in its logarithm grows: by a third at beta2 = 0.999.
* Without expansion, decode and encode again gives the same bytes with FP8, unless a value became
  subnormal. With expansion the second pass may find another k, and with int8 another a, because the
  group's extremes moved by their own rounding: the error bound holds for it anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch

from ..formats import ALWAYS_EXPANDED, FirstMomentFormat, SecondMomentFormat
from .moment_formats import MOMENT_FORMATS, TINY, MomentFormat

FIRST_MOMENT_FORMATS = get_args(FirstMomentFormat)
SECOND_MOMENT_FORMATS = get_args(SecondMomentFormat)
RATIO_SPAN = 8.0
K_SLACK = 1 / 16
_BF16_MAX_BITS = 0x7F7F0000
_HEADROOM, _LOOSE = 1 << 21, 1 << 22
"""A quarter and a half of an octave in the bits of fp32, where mantissa bits are taken for parts
of an octave.
"""
_SAME = 64
"""fp32 steps, 2**-18 to 2**-17 of a value, that errors of arithmetic may add: a group's largest
element is read, as a product or by approximations, and written again, and an amax must not rise by
a bf16 step each time.
"""


class Moment(NamedTuple):
    """One encoded moment of n elements: ``q`` uint8 [groups, group_size], ``a`` bf16 [groups],
    ``k`` uint8 [groups].
    """

    q: torch.Tensor
    a: torch.Tensor
    k: torch.Tensor

    def copy_(self, other: Moment) -> None:
        """Overwrite the three tensors."""
        for mine, new in zip(self, other, strict=True):
            mine.copy_(new)


@dataclass(frozen=True)
class MomentCodec:
    """How one moment is stored.

    ``format`` is one of FIRST_MOMENT_FORMATS, with ``keep_nonzero`` of SECOND_MOMENT_FORMATS.
    ``expand`` off means that codes are proportional to values: plain FP8 or int8 with an amax a
    group, k = 16 or 64 always; "log8" has nothing like it. ``over_root`` and ``keep_grid`` are as
    above. ``keep_nonzero``, meant for the second moment, keeps codes and decoded values of non-zero
    elements from reaching zero: it rounds up to the smallest code (without expansion only; with it
    none is that small) and to 2**-126.

    Raises:
        ValueError: a format that the moment does not have, or "log8" without expansion.
    """

    format: str = "e4m3"
    expand: bool = True
    group_size: int = 128
    keep_nonzero: bool = False
    over_root: bool = False
    keep_grid: bool = False

    def __post_init__(self) -> None:
        accepted = SECOND_MOMENT_FORMATS if self.keep_nonzero else FIRST_MOMENT_FORMATS
        if self.format not in accepted:
            which = "second" if self.keep_nonzero else "first"
            raise ValueError(
                f"format of the {which} moment: got {self.format!r}, accepted: "
                f"{', '.join(map(repr, accepted))}"
            )
        if self.format in ALWAYS_EXPANDED and not self.expand:
            raise ValueError(
                f"expand: got False with {self.format}, accepted: True (its codes always span the "
                "group's range)"
            )

    @property
    def kind(self) -> MomentFormat:
        """What ``format`` names."""
        return MOMENT_FORMATS[self.format]

    @property
    def unit(self) -> float:
        """k of a power of one; with "log8", of steps of one octave."""
        return self.kind.unit

    @property
    def k_numerator(self) -> float:
        """unit * log2(R); 0 where there is no R ("log8")."""
        return self.kind.unit * (self.kind.log2_range or 0.0)

    @property
    def k_of_zeros(self) -> int:
        """k of a group of zeros."""
        return self.kind.k_of_zeros if self.expand else int(self.unit)

    @property
    def span(self) -> float:
        """The widest spread of a group, in octaves, that k is chosen for."""
        return RATIO_SPAN if self.over_root else math.inf

    def groups(self, n: int) -> int:
        """Groups that n elements take."""
        return -(-n // self.group_size)

    def zeros(self, n: int, device: torch.device | str | None = None) -> Moment:
        """The encoding of n zeros."""
        groups = self.groups(n)
        return Moment(
            torch.zeros(groups, self.group_size, dtype=torch.uint8, device=device),
            torch.zeros(groups, dtype=torch.bfloat16, device=device),
            torch.full((groups,), self.k_of_zeros, dtype=torch.uint8, device=device),
        )


def encode(
    x: torch.Tensor,
    codec: MomentCodec,
    noise: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
    before: Moment | None = None,
) -> Moment:
    """Encode a tensor as described above; the last group is filled up with zeros.

    Args:
        x: any shape and floating dtype, n elements, taken in C order.
        noise: ``None`` rounds to nearest, ties to even; fp32 in [0, 1), n elements, rounds
            stochastically, without bias as described above.
        second: the second moment of the same elements, with ``over_root`` only: what ``x`` is
            divided by the root of.
        before: what the moment was; a group keeps its ``a`` and ``k`` where they still serve.
    """
    groups, size = codec.groups(x.numel()), codec.group_size
    x = x.float()
    if second is not None:
        x = x.reshape(-1) / divisor(second.float().reshape(-1))
    x = _as_groups(x, groups, size)
    magnitude = x.abs()
    magnitude = torch.where(magnitude < TINY, 0.0, magnitude)
    top = magnitude.amax(1)
    a = _upper_bound(top, None if before is None else before.a)
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(1)
    log_a = torch.log2(torch.where(a == 0, 1.0, a))
    spread = log_a - torch.log2(smallest)  # -inf for a group of zeros, NaN for a non-finite one
    # A difference of logarithms, not the logarithm of a ratio: |x| / a underflows for ratios that
    # must survive.
    log_ratio = torch.log2(magnitude) - log_a[:, None]
    kind = codec.kind
    if codec.expand:
        k = kind.exponents(spread.clamp(max=codec.span), codec.k_numerator)
        if before is not None:
            spare = (k - before.k.float()) * kind.finer
            k = torch.where((spare >= 0) & (spare <= 1.0 + k * K_SLACK), before.k.float(), k)
    else:
        k = torch.full_like(a, codec.unit)
    noise = None if noise is None else _as_groups(noise, groups, size)
    q = kind.codes(kind.spaced(log_ratio, k), x, k, noise, codec.keep_nonzero)
    return Moment(q, a.to(torch.bfloat16), k.to(torch.uint8))


def decode(
    moment: Moment, codec: MomentCodec, n: int | None = None, second: torch.Tensor | None = None
) -> torch.Tensor:
    """The first ``n`` elements (default: all, filling included), flat, fp32.

    ``second``: with ``over_root``, the decoded second moment of as many elements; without it the
    ratio is returned.
    """
    code, log_ratio = codec.kind.read(moment.q, moment.k.float())
    # Half the exponent twice: the power alone underflows where its product with a does not. The
    # largest code gives a exactly.
    root = torch.exp2(0.5 * log_ratio)
    x = moment.a.float()[:, None] * root * root
    # A code's own rounding must not make it a subnormal, which the next encoding takes for zero.
    if codec.keep_nonzero:
        x = torch.where((code != 0) & (x < TINY), TINY, x)
    x = torch.copysign(x, code).view(-1)[:n]
    return x if second is None else x * divisor(second)


def divisor(second: torch.Tensor) -> torch.Tensor:
    """What a first moment is divided by before it is encoded: the root of the second, 2**-63 at
    least.
    """
    return second.clamp(min=TINY).sqrt()


def _as_groups(x: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """[groups, size], the last group filled with zeros."""
    x = x.reshape(-1)
    return torch.nn.functional.pad(x, (0, groups * size - x.numel())).view(groups, size)


def _upper_bound(top: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The smallest bf16 value not below ``top``, as fp32; NaN where that is not finite. With
    ``before`` that one, where it is an upper bound by half an octave at most; else a bound with
    headroom.
    """
    bits = _bf16_bits(top, 0)
    if before is not None:
        old = before.float().view(torch.int32)
        higher = torch.where(top > 0, _bf16_bits(top, _HEADROOM), 0)
        bits = torch.where((old >= bits) & (old <= bits + _LOOSE), old, higher)
    return torch.where(top.isfinite(), bits.view(torch.float32), torch.nan)


def _bf16_bits(x: torch.Tensor, more: int) -> torch.Tensor:
    """Bits of the smallest bf16 value not below x >= 0 when ``more`` is added to its own; of the
    largest finite one at most. What is above a bf16 value by less than _SAME is that value.
    """
    return (
        (x.view(torch.int32).clamp(max=_BF16_MAX_BITS) + (more + 0xFFFF - _SAME)) & ~0xFFFF
    ).clamp(max=_BF16_MAX_BITS)
