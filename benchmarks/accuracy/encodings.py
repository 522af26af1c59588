"""Encodings of Adam's moments to compare: this project's with any range, code tables, and published rivals.

An encoding is a round trip: a flat fp32 tensor [n] in, what a reader of the stored bytes would decode out. Stored
bytes are counted, not built: codes take one byte, and what a group adds is given with each encoding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from coat_dist.optim import state as optimizer_state
from coat_dist.reference.dither import dither
from coat_dist.reference.moments import TINY, MomentCodec, decode, encode

__all__ = [
    "Encoding",
    "RangedCodec",
    "altered",
    "coat",
    "dynamic",
    "flash_first_moment",
    "flash_second_moment",
    "plain_fp8",
    "table",
    "table_levels",
]


@dataclass(frozen=True)
class Encoding:
    """``round_trip`` maps fp32 [n] to fp32 [n]; ``bytes`` are those stored for an element, group overhead included."""

    round_trip: Callable[[torch.Tensor], torch.Tensor] = field(repr=False)
    bytes: float


@dataclass(frozen=True)
class RangedCodec(MomentCodec):
    """MomentCodec whose R is 2**log2_range."""

    log2_range: float = 0.0

    @functools.cached_property
    def k_numerator(self) -> float:
        return self.unit * self.log2_range


@contextmanager
def altered(factor: float | None = None, fresh_grids: bool = False, independent_noise: bool = False) -> Iterator[None]:
    """Within it, steps of CoatAdamW by its definition encode moments otherwise.

    Args:
        factor: of F**2, what R of first moments in FP8 is; None: the package's R.
        fresh_grids: find amax and exponent of a second moment's group anew in each step, as those of a first one.
        independent_noise: of steps, instead of noise that is spread over eight of them.
    """

    def codecs(group: Any) -> tuple[MomentCodec, MomentCodec]:
        m, v = optimizer_state.codecs(group)
        if factor is not None and m.format != "int8" and m.expand:
            m = RangedCodec(**vars(m), log2_range=math.log2(m.fp8.max**2 * factor))
        return m, replace(v, keep_grid=False) if fresh_grids else v

    def noise(seed: int, step: int, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return dither(seed, 8 * step if independent_noise else step, *rest)

    with (
        mock.patch("coat_dist.optim.adamw.codecs", codecs),
        mock.patch("coat_dist.reference.adamw.dither", noise),
    ):
        yield


def coat(
    format: str = "e4m3",
    expand: bool = True,
    group_size: int = 128,
    *,
    second: bool,
    log2_range: float | None = None,
    seed: int | None = None,
) -> Encoding:
    """This project's encoding (``coat_dist/reference/moments.py``).

    Args:
        format: one that the moment has, "int8" and "log8" included.
        second: the second moment, of which non-zero elements must not become zero.
        log2_range: of R, which log8 does not have; the package's choice if None.
        seed: of stochastic rounding; to nearest if None.
    """
    if log2_range is None:
        codec = MomentCodec(format, expand, group_size, keep_nonzero=second)
    else:
        codec = RangedCodec(format, expand, group_size, keep_nonzero=second, log2_range=log2_range)

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        noise = (
            None if seed is None else torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
        )
        return decode(encode(x, codec, noise), codec, x.numel())

    return Encoding(round_trip, 1 + 3 / group_size)


def plain_fp8(format: str, group_size: int, scale_bytes: int = 4) -> Encoding:
    """FP8 with an fp32 scale a group, rounded to nearest, small values to zero: COAT's baseline; with groups of 256
    torchao's ``AdamWFp8``."""
    fp8 = MomentCodec(format).fp8

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        grouped = _groups(x, group_size)
        scale = (grouped.abs().amax(1, keepdim=True) / fp8.max).clamp(min=TINY)
        return ((grouped / scale).to(fp8.dtype).float() * scale).view(-1)[: x.numel()]

    return Encoding(round_trip, 1 + scale_bytes / group_size)


def table_levels(kind: str) -> torch.Tensor:
    """Magnitudes that a code can stand for, ascending from 0, the largest 1; fp32.

    ``s-`` kinds spend a bit on the sign (128 magnitudes), ``u-`` kinds do not (256). ``eXmY`` is a floating-point
    format with X exponent and Y mantissa bits and subnormals.
    """
    sign, _, name = kind.partition("-")
    mantissa_bits = int(name[3])
    code = torch.arange({"s": 128, "u": 256}[sign])
    exponent, mantissa = code >> mantissa_bits, (code & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    levels = torch.where(exponent == 0, 2 * mantissa, torch.exp2(exponent.double()) * (1 + mantissa))
    return (levels / levels[-1]).float()


def table(kind: str, log2_range: float, group_size: int = 128, *, second: bool) -> Encoding:
    """Expanded values rounded to the nearest level of :func:`table_levels`: our amax and exponent, other codes."""
    on = _tables(table_levels(kind))
    codec = RangedCodec(group_size=group_size, log2_range=log2_range)

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        moment = encode(x, codec)  # for a and k
        levels, between = on(x.device)
        a, power = moment.a.float()[:, None], (moment.k.float() / 16)[:, None]
        magnitude = _groups(x, group_size).abs()
        y = torch.exp2(((torch.log2(magnitude) - torch.log2(a)) * power).clamp(max=0.0))
        code = torch.bucketize(y, between)
        if second:
            code = torch.where(magnitude >= TINY, code.clamp(min=1), code)
        decoded = torch.where(a > 0, a * levels[code] ** (1 / power), 0.0)
        return torch.copysign(decoded.view(-1)[: x.numel()], x.reshape(-1))

    return Encoding(round_trip, 1 + 3 / group_size)


def flash_first_moment() -> Encoding:
    """FlashOptim's first moment (arXiv 2602.23349, algorithm 2): groups of 32, fp16 scale, softsign, int8."""

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        grouped = _groups(x, 32)
        scale = grouped.abs().amax(1, keepdim=True).half().float()
        ratio = torch.where(scale > 0, grouped / scale, 0.0)
        z = (2 * ratio / (1 + ratio.abs()) * 127).round().clamp(-127, 127) / 127
        return (z / (2 - z.abs()) * scale).view(-1)[: x.numel()]

    return Encoding(round_trip, 1 + 2 / 32)


def flash_second_moment() -> Encoding:
    """FlashOptim's second moment (arXiv 2602.23349, algorithm 3): the root in uint8, groups of 32, fp16 scale."""

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        grouped = _groups(x, 32).sqrt()
        scale = grouped.amax(1, keepdim=True).half().float()
        ratio = torch.where(scale > 0, grouped / scale, 0.0)
        root = (ratio * 255).round().clamp(0, 255) / 255 * scale
        return (root * root).view(-1)[: x.numel()]

    return Encoding(round_trip, 1 + 2 / 32)


def dynamic(*, second: bool, group_size: int = 256) -> Encoding:
    """Dynamic 8-bit tree quantization (Dettmers et al., arXiv 2110.02861) with an fp32 amax a group, as in
    bitsandbytes' and torchao's ``AdamW8bit``: seven decades, the larger ones with more levels."""
    on = _tables(_dynamic_levels(signed=not second))

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        grouped = _groups(x, group_size)
        scale = grouped.abs().amax(1, keepdim=True)
        ratio = torch.where(scale > 0, grouped / scale, 0.0)
        levels, between = on(x.device)
        return (levels[torch.bucketize(ratio, between)] * scale).view(-1)[: x.numel()]

    return Encoding(round_trip, 1 + 4 / group_size)


def _dynamic_levels(signed: bool) -> torch.Tensor:
    """The 256 levels: decade i of 7 has the middles of 2**i (signed) or 2**(i + 1) equal parts of [0.1, 1] times
    10**(i - 6); zero and one besides."""
    positive = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6))
    middle = torch.cat(positive)
    parts = [middle, torch.tensor([0.0, 1.0], dtype=torch.float64)] + ([-middle] if signed else [])
    return torch.cat(parts).sort().values.float()


def _tables(levels: torch.Tensor) -> Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]:
    """Levels and the middles between them, on a device."""
    between = (levels[1:] + levels[:-1]) / 2
    return functools.cache(lambda device: (levels.to(device), between.to(device)))


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[groups, size], the last group filled with zeros."""
    x = x.reshape(-1)
    return torch.nn.functional.pad(x, (0, math.ceil(x.numel() / size) * size - x.numel())).view(-1, size)
