"""Bare numbers that are read with another width than they were written with, told by where zeros are."""

from __future__ import annotations

import numpy as np

from launch.prep import DataError

__all__ = ["check_width"]

_LOOKED_AT = 1 << 22  # tokens from the beginning
_FEWEST = 16  # tokens, below which a pattern may be chance
_HIGH = 3  # upper halves of ids below 2^18, more than any vocabulary has


def check_width(tokens: np.ndarray, where: str) -> None:
    """Refuse numbers of 4 or 8 bytes that are read with fewer, of which only the lowest part of each is an id.

    The other parts, every second place or three of four, are zeros. Zeros that ids have themselves (padding, or an end
    of documents) fall on all places alike.

    Args:
        tokens: integers of 2 or 4 bytes ``[length]``, in this machine's byte order.
        where: of the error.

    Raises:
        DataError: says what the numbers look like.
    """
    head = np.asarray(tokens[:_LOOKED_AT])
    if len(head) < _FEWEST:
        return
    for width in (8, 4):  # numbers of 8 bytes look like those of 4, too
        stride = width // head.itemsize
        if stride > 1 and _parts(head, stride):
            told = "three of four tokens are 0" if stride == 4 else "every second token is about 0"
            name, accepted = ("int64", "uint16 or uint32") if width == 8 else ("uint32", "its real dtype")
            raise DataError(
                f"{where}: {told} when it is read as {head.dtype}: it looks like {name}, accepted: {accepted}"
            )


def _parts(head: np.ndarray, stride: int) -> bool:
    """Whether ids are in one place of ``stride``, and upper parts of numbers in the others."""
    low, *high = (float((head[place::stride] <= _HIGH).mean()) for place in range(stride))
    return min(high) > 0.99 and low < 0.9
