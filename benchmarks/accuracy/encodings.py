"""Encodings of Adam's moments that are known to be worse than this project's: its own, with
another range or grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from coat_dist.optim import state as optimizer_state
from coat_dist.reference.dither import dither
from coat_dist.reference.moments import MomentCodec


@dataclass(frozen=True)
class RangedCodec(MomentCodec):
    """MomentCodec whose R is 2**log2_range."""

    log2_range: float = 0.0

    @functools.cached_property
    def k_numerator(self) -> float:
        return self.unit * self.log2_range


@contextmanager
def altered(
    factor: float | None = None, fresh_grids: bool = False, independent_noise: bool = False
) -> Iterator[None]:
    """Within it, steps of CoatAdamW by its definition encode moments otherwise.

    Args:
        factor: of F**2, what R of first moments in FP8 is; None: the package's R.
        fresh_grids: find amax and exponent of a second moment's group anew in each step, as those
            of a first one.
        independent_noise: of steps, instead of noise that is spread over eight of them.
    """

    def codecs(group: Any) -> tuple[MomentCodec, MomentCodec]:
        m, v = optimizer_state.codecs(group)
        if factor is not None and m.format != "int8" and m.expand:
            m = RangedCodec(**vars(m), log2_range=math.log2(m.kind.max**2 * factor))
        return m, replace(v, keep_grid=False) if fresh_grids else v

    def noise(seed: int, step: int, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return dither(seed, 8 * step if independent_noise else step, *rest)

    with (
        mock.patch("coat_dist.optim.adamw.codecs", codecs),
        mock.patch("coat_dist.reference.adamw.dither", noise),
    ):
        yield
