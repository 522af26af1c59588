"""AdamW moments in FP8: 128 codes, one amax and one exponent a group.

A group is ``group_size`` consecutive elements of the flat tensor. With F the format's largest value it is stored as

* ``a``: max|x| in bfloat16, rounded **up**, so that |x| / a never exceeds one;
* ``k``: an exponent in steps of 1/16, uint8, 1 to 255;
* ``q``: one FP8 code an element, ``sign(x) * round_fp8(F * (|x| / a) ** (k / 16))``,

and read back as ``sign(q) * a * (|q| / F) ** (16 / k)``. This is dynamic range expansion (COAT, arXiv 2410.19313,
section 4), in 3 bytes of metadata a group. The exponent makes the group's ratio of largest to smallest non-zero
magnitude fill the range R that the format keeps::

    k = floor(16 * log2(R) / log2(a / b)) clamped to [1, 255],   b = the smallest non-zero |x|

A larger R means a finer grid, and less room below the smallest element. The second moment is divided by, so
R = F**2 / 2 puts b at F / R = 2 / F, 2.3 steps of the subnormal grid in both formats: neither kind of rounding can turn
it into zero. Of the first moment only absolute errors count: R = 2 * F**2 puts b at 0.57 steps, just where rounding to
nearest still keeps it from zero. Measured on the moments of a real run (docs/numerics.md): with COAT's F**2 / 2 for
both, the mean square error of m / (sqrt(v) + eps) is a fifth larger; not far beyond these values lie cliffs, where
small elements become zero.
FP8 has more range than most groups of moments have spread, so k is mostly above one and the grid becomes finer than
plain FP8; where the spread is larger, k below one compresses it. k = 1/16 reaches ratios of 2**265, more than fp32's
normal range.

What holds for every input, and is tested:

* Finite input decodes to finite values: constant groups (k clamps), tails of one element, zeros anywhere, groups of
  nothing but zeros (a = 0), values next to fp32's maximum (a stops at bfloat16's).
* Zero decodes to zero. With ``keep_nonzero``, which the second moment needs because it is divided by, magnitudes from
  2**-126 up never become zero nor subnormal. Without it but with expansion, rounding to nearest gives them non-zero
  codes; stochastic rounding may round the smallest to zero.
* fp32 subnormals (below 2**-126) count as zero, as GPU arithmetic treats them.
* Infinity or NaN anywhere makes its whole group decode to NaN: it is never hidden.
* Error of one element, with y = F * (|x| / a) ** (k / 16): ``|log2(decoded / |x|)| <= -log2(1 - d) * 16 / k``, where
  d = 2**-(mantissa bits + 1) if y is a normal number of the format and smallest / (2 * y) if it is subnormal.
  Stochastic rounding doubles d.
* Without expansion, decode and encode again gives the same bytes. With expansion the second pass may find another k,
  because the group's extremes moved by their own rounding: the error bound holds for it anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..formats import FP8Format, fp8_format

__all__ = ["Moment", "MomentCodec", "TINY", "decode", "encode", "lowest_exponent", "uniform_noise"]

TINY = 2.0**-126
"""Smallest normal fp32: magnitudes below it are stored as zero."""
_BF16_MAX_BITS = 0x7F7F0000
_UINT32 = 0xFFFFFFFF


class Moment(NamedTuple):
    """One encoded moment of n elements: ``q`` uint8 [groups, group_size], ``a`` bf16 [groups], ``k`` uint8 [groups]."""

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

    ``expand`` off means k = 16 always: plain per-group FP8. ``keep_nonzero``, meant for the second moment, keeps codes
    and decoded values of non-zero elements from reaching zero: it takes the smaller R, rounds up to the smallest code
    (without expansion only; with it none is that small) and to 2**-126.
    """

    format: str = "e4m3"
    expand: bool = True
    group_size: int = 128
    keep_nonzero: bool = False

    @cached_property
    def fp8(self) -> FP8Format:
        return fp8_format(self.format)

    @cached_property
    def k_numerator(self) -> float:
        """16 * log2(R)."""
        return 16.0 * math.log2(self.fp8.max**2 * (0.5 if self.keep_nonzero else 2.0))

    def groups(self, n: int) -> int:
        """Groups that n elements take."""
        return -(-n // self.group_size)

    def zeros(self, n: int, device: torch.device | str | None = None) -> Moment:
        """The encoding of n zeros."""
        groups = self.groups(n)
        k = 255 if self.expand else 16
        return Moment(
            torch.zeros(groups, self.group_size, dtype=torch.uint8, device=device),
            torch.zeros(groups, dtype=torch.bfloat16, device=device),
            torch.full((groups,), k, dtype=torch.uint8, device=device),
        )


def encode(x: torch.Tensor, codec: MomentCodec, noise: torch.Tensor | None = None) -> Moment:
    """Encode a tensor as described above; the last group is filled up with zeros.

    Args:
        x: any shape and floating dtype, n elements, taken in C order.
        noise: ``None`` rounds to nearest, ties to even; fp32 in [0, 1), n elements, rounds stochastically, without bias
            in the stored value ``F * (|x| / a) ** (k / 16)``.
    """
    groups, size = codec.groups(x.numel()), codec.group_size
    x = _as_groups(x.float(), groups, size)
    magnitude = x.abs()
    magnitude = torch.where(magnitude < TINY, 0.0, magnitude)
    a = _round_up_to_bf16(magnitude.amax(1))
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(1)
    log_a = torch.log2(torch.where(a == 0, 1.0, a))
    if codec.expand:
        spread = log_a - torch.log2(smallest)  # -inf for a group of zeros, NaN for a non-finite one
        k = torch.where(spread > 0, torch.floor(codec.k_numerator / spread), 255.0).clamp(1.0, 255.0)
    else:
        k = torch.full_like(a, 16.0)
    # A difference of logarithms, not the logarithm of a ratio: |x| / a underflows for ratios that must survive.
    y = codec.fp8.max * torch.exp2(((torch.log2(magnitude) - log_a[:, None]) * (k / 16.0)[:, None]).clamp(max=0.0))
    if noise is not None:
        y = _round_stochastically(y, codec.fp8, _as_groups(noise, groups, size))
    q = y.to(codec.fp8.dtype).view(torch.uint8)
    if codec.keep_nonzero:
        q = torch.where((q == 0) & (magnitude > 0), 1, q)
    return Moment(q | (x.signbit().to(torch.uint8) << 7), a.to(torch.bfloat16), k.to(torch.uint8))


def decode(moment: Moment, codec: MomentCodec, n: int | None = None) -> torch.Tensor:
    """The first ``n`` elements (default: all, filling included), flat, fp32."""
    code = moment.q.view(codec.fp8.dtype).float()
    # Half the exponent twice: the power alone underflows where its product with a does not. Code F gives a exactly.
    root = torch.exp2(torch.log2(code.abs() / codec.fp8.max) * (8.0 / moment.k.float())[:, None])
    x = moment.a.float()[:, None] * root * root
    if codec.keep_nonzero:  # a code's own rounding must not make it a subnormal, which the next encoding takes for zero
        x = torch.where((code != 0) & (x < TINY), TINY, x)
    return torch.copysign(x, code).view(-1)[:n]


def uniform_noise(
    seed: int, first: int, n: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent uniform fp32 tensors [n] in [0, 1), in steps of 2**-16, for elements ``first`` to ``first + n``.

    Counter-based: an element's noise depends on ``seed`` (uint32) and its index only. So results do not depend on
    chunking or device, checkpoints need no generator state, and the kernel reproduces them bit for bit. The mixing
    function is the multiply-xorshift "lowbias32" (C. Wellons, hash-prospector).
    """
    index = torch.arange(first, first + n, device=device)
    bits = _mix((index & _UINT32) ^ _mix((index >> 32) ^ seed))
    return (bits >> 16).float() * 2.0**-16, (bits & 0xFFFF).float() * 2.0**-16


def lowest_exponent(fp8: FP8Format) -> int:
    """Biased fp32 exponent of the format's smallest normal value: below it, values are equally spaced."""
    return 127 + round(math.log2(fp8.smallest)) + fp8.mantissa_bits


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective hash of uint32 values held as int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _UINT32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _UINT32  # wraps in int64, the low 32 bits are right
    return x ^ (x >> 16)


def _as_groups(x: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """[groups, size], the last group filled with zeros."""
    x = x.reshape(-1)
    return torch.nn.functional.pad(x, (0, groups * size - x.numel())).view(groups, size)


def _round_up_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The smallest bf16 value not below x >= 0, as fp32; the largest finite one at most; NaN where x is not finite."""
    bits = (x.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return torch.where(x.isfinite(), bits.clamp(max=_BF16_MAX_BITS).view(torch.float32), torch.nan)


def _round_stochastically(y: torch.Tensor, fp8: FP8Format, noise: torch.Tensor) -> torch.Tensor:
    """One of the two neighbours of 0 <= y <= F in the format: the upper with the probability that keeps the mean."""
    exponent = (y.view(torch.int32) >> 23).clamp(min=lowest_exponent(fp8))
    step = ((exponent - fp8.mantissa_bits) << 23).view(torch.float32)
    return torch.where(y.isfinite(), torch.floor(y / step + noise) * step, y)
