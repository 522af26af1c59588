"""Pictures of two coloured shapes with the sentence that describes them, drawn by torch alone.

A scene is two things and how they lie: "a small red circle left of a large blue square". Every
picture has one right sentence: the thing on the left, or above, comes first. Places, shades,
background and noise are drawn at random, from the generator that is given. Of all pairs of things
an eighth never occurs in training, in whatever order and relation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement, product

import torch

SIZES = {"small": 0.13, "large": 0.22}  # half of a thing's width, in parts of the picture's
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0.2, 1), "yellow": (1, 1, 0)}
SHAPES = ("circle", "square", "triangle")
RELATIONS = {"left of": ("left", "of"), "above": ("above",)}

WORDS = (
    "<pad>",
    "<image>",
    "<start>",
    "<end>",
    "a",
    *SIZES,
    *COLOURS,
    *SHAPES,
    "left",
    "of",
    "above",
)
PAD, IMAGE, START, END = range(4)
VOCABULARY = 32
"""Size of the table of tokens: the words, and a rest that is never used."""
CAPTION = 11
"""Tokens of the longest caption, ``<end>`` included."""

THINGS = list(product(range(len(SIZES)), range(len(COLOURS)), range(len(SHAPES))))
PAIRS = list(combinations_with_replacement(range(len(THINGS)), 2))
_shuffled = torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(0)).tolist()
HELD_OUT = [PAIRS[i] for i in _shuffled[: len(PAIRS) // 8]]
TRAINED = [PAIRS[i] for i in _shuffled[len(PAIRS) // 8 :]]


def sample(count: int, generator: torch.Generator, held_out: bool = False) -> torch.Tensor:
    """``count`` scenes ``[count, 3]``: the first thing, the second one, and the relation, as
    indices.
    """
    pairs = torch.tensor(HELD_OUT if held_out else TRAINED)
    chosen = pairs[torch.randint(len(pairs), (count,), generator=generator)]
    swap = torch.rand(count, 1, generator=generator) < 0.5
    relation = torch.randint(len(RELATIONS), (count, 1), generator=generator)
    return torch.cat([torch.where(swap, chosen.flip(1), chosen), relation], 1)


def captions(scenes: torch.Tensor) -> torch.Tensor:
    """The tokens of each scene's sentence, ``[count, CAPTION]``, ended by ``<end>`` and filled
    with ``<pad>``.
    """
    rows = []
    for first, second, relation in scenes.tolist():
        words = [
            "a",
            *_words(first),
            *list(RELATIONS.values())[relation],
            "a",
            *_words(second),
            "<end>",
        ]
        rows.append([WORDS.index(word) for word in words] + [PAD] * (CAPTION - len(words)))
    return torch.tensor(rows)


def sentence(tokens: torch.Tensor) -> str:
    """The words of a caption ``[CAPTION]``, up to ``<end>``."""
    words = [WORDS[t] if t < len(WORDS) else "<unused>" for t in tokens.tolist()]
    return " ".join(words[: words.index("<end>")] if "<end>" in words else words)


def draw(
    scenes: torch.Tensor, side: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Pictures ``[count, 3, side, side]`` with values from about -1 to 1, drawn on ``device``.

    ``generator`` is the CPU's. Another device has its own for the noise, which differs between
    kinds of devices.
    """
    count, scenes = len(scenes), scenes.to(device)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return (low + (high - low) * torch.rand(count, *shape, generator=generator)).to(device)

    def table(values: Iterable) -> torch.Tensor:
        return torch.tensor(list(values), device=device)

    picture = uniform(0.1, 0.3, 1, 1, 1).expand(count, 3, side, side)
    above = scenes[:, 2] == 1
    for place, thing in ((0.25, scenes[:, 0]), (0.75, scenes[:, 1])):
        size, colour, shape = table(THINGS)[thing].unbind(1)
        along, across = uniform(place - 0.03, place + 0.03), uniform(0.42, 0.58)
        x, y = torch.where(above, across, along), torch.where(above, along, across)
        radius = table(SIZES.values())[size] * uniform(0.95, 1.05)
        covered = _covered(shape, x * side, y * side, radius * side, side)
        paint = table(COLOURS.values())[colour] * uniform(0.8, 1.0, 1)
        picture = picture + covered[:, None] * (paint[:, :, None, None] - picture)
    if torch.device(device).type != "cpu":
        seed = int(torch.randint(2**31, (1,), generator=generator))
        generator = torch.Generator(device).manual_seed(seed)
    return (
        2 * picture
        - 1
        + 0.03 * torch.randn(count, 3, side, side, generator=generator, device=device)
    )


def _words(thing: int) -> tuple[str, str, str]:
    size, colour, shape = THINGS[thing]
    return list(SIZES)[size], list(COLOURS)[colour], SHAPES[shape]


def _covered(
    shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, side: int
) -> torch.Tensor:
    """How much of each pixel a shape covers, ``[count, side, side]``: a step of one pixel at its
    edge.
    """
    pixels = torch.arange(side, device=x.device) + 0.5
    dx, dy = pixels[None, None, :] - x[:, None, None], pixels[None, :, None] - y[:, None, None]
    r = radius[:, None, None]
    outside = torch.stack(  # distance from the edge of each kind of shape, below zero inside
        [
            (dx.square() + dy.square()).sqrt() - r,
            torch.maximum(dx.abs(), dy.abs()) - 0.9 * r,
            torch.maximum(dy - 0.8 * r, 0.87 * dx.abs() - 0.5 * (dy + r)),
        ]
    )
    return (0.5 - outside[shape, torch.arange(len(shape), device=x.device)]).clamp(0, 1)
