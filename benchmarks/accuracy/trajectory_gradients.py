"""Gradients that show what encoded moments do over many steps; `trajectories.py` trains with them.

All are drawn anew from a seed. Elements are in groups of unlike ones, unless a scenario says that
they are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

ELEMENTS = 512


class Gradients(NamedTuple):
    """``steps``: fp32 [number of steps, n]; ``watched``: bool [n], the elements whose displacement
    is measured; ``stops``: watched elements have gradients of one size, and then none.
    """

    steps: torch.Tensor
    watched: torch.Tensor
    stops: bool = False


def normal(
    n: int = ELEMENTS, steps: int = 400, size: float = 1.0, octaves: float = 0.0, seed: int = 0
) -> Gradients:
    """Normal gradients, of deviation ``size * 2 ** (octaves * N)`` with a normal N for each
    element.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation = size * torch.exp2(octaves * torch.randn(n, generator=generator))
    return _all(torch.randn(steps, n, generator=generator) * deviation)


def sparse(n: int = ELEMENTS, density: float = 0.02, steps: int = 400, seed: int = 0) -> Gradients:
    """Each element has a normal gradient in a share of the steps, and none in the others."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(steps, n, generator=generator) < density
    return _all(torch.randn(steps, n, generator=generator) * present)


def heavy_tailed(n: int = ELEMENTS, steps: int = 400, seed: int = 0) -> Gradients:
    """Deviations are spread evenly over eight decades, in every group."""
    generator = torch.Generator().manual_seed(seed)
    deviation = 10 ** (8 * torch.rand(n, generator=generator) - 4)
    return _all(torch.randn(steps, n, generator=generator) * deviation)


def one_sided(n: int = ELEMENTS, steps: int = 400, seed: int = 0) -> Gradients:
    """:func:`normal` over 1.5 octaves, without signs."""
    return _all(normal(n, steps, octaves=1.5, seed=seed).steps.abs())


def changing_scale(n: int = ELEMENTS, steps: int = 400, seed: int = 0) -> Gradients:
    """:func:`normal` over 1.5 octaves whose size goes up and down by two decades, in 200 steps."""
    size = 10 ** (2 * torch.sin(2 * math.pi * torch.arange(steps) / 200))
    return _all(normal(n, steps, octaves=1.5, seed=seed).steps * size[:, None])


def stopped(
    n: int = ELEMENTS,
    small: float = 1e-4,
    constant: bool = False,
    steps: int = 60,
    share: float = 0.1,
    seed: int = 0,
) -> Gradients:
    """A ``share`` of the elements has five gradients of ``small`` and then none; others are
    normal, or always 1.
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(steps, n, generator=generator)
    if constant:
        gradients.fill_(1.0)
    watched = torch.rand(n, generator=generator) < share
    gradients[:, watched] = 0.0
    gradients[:5, watched] = small
    return Gradients(gradients, watched, stops=True)


def decaying(n: int = ELEMENTS, factor: float = 0.8, steps: int = 60, seed: int = 0) -> Gradients:
    """Half of the elements have normal gradients that shrink by ``factor`` in each step."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(steps, n, generator=generator)
    watched = torch.rand(n, generator=generator) < 0.5
    gradients *= torch.where(watched, factor ** torch.arange(steps)[:, None], 1.0)
    return Gradients(gradients, watched)


def _all(steps: torch.Tensor) -> Gradients:
    return Gradients(steps, torch.ones(steps.shape[1], dtype=torch.bool))


SCENARIOS: dict[int, dict[str, Callable[[], Gradients]]] = {
    20: {"random": partial(normal, steps=20)},
    60: {
        "stopped": stopped,
        "stopped at 1e-7": partial(stopped, small=1e-7),
        "beside constants": partial(stopped, constant=True),
        "both": partial(stopped, small=1e-7, constant=True),
        "decaying": decaying,
    },
    400: {
        "random": normal,
        "spread": partial(normal, octaves=1.5),
        "sparse": sparse,
        "heavy-tailed": heavy_tailed,
        "one-sided": one_sided,
        "changing": changing_scale,
        "tiny": partial(normal, size=1e-20),
        "huge": partial(normal, size=1e18),
    },
    2000: {
        "random": partial(normal, steps=2000),
        "spread": partial(normal, steps=2000, octaves=1.5),
        "sparse": partial(sparse, steps=2000),
    },
}
"""Scenarios by number of steps; "both" is "stopped at 1e-7" and "beside constants"."""
