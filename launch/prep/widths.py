"""Bare numbers that are read with another width than they were written with, told by where zeros are."""

from __future__ import annotations

import numpy as np

from launch.prep import DataError

__all__ = ["check_width"]

_LOOKED_AT = 1 << 22  # tokens from the beginning
_FEWEST = 16  # ids above 3, below which a pattern may be chance
_SECOND = 3  # of two bytes each, the second one of an id below 2^18, more than any vocabulary has


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
    for width in (8, 4):  # numbers of 8 bytes look like those of 4, too
        stride = width // head.itemsize
        if stride > 1 and _parts(head, stride):
            told = "three of four tokens are about 0" if stride == 4 else "every second token is about 0"
            name, accepted = ("int64", "uint16 or uint32") if width == 8 else ("uint32", "its real dtype")
            raise DataError(
                f"{where}: {told} when it is read as {head.dtype}: it looks like {name}, accepted: {accepted}"
            )


def _parts(head: np.ndarray, stride: int) -> bool:
    """Whether ids are in one place of ``stride``, and upper parts of numbers in the others."""
    ids = int((head[::stride] > 3).sum())  # 0 to 3: padding and the like
    most = [_SECOND if head.itemsize == 2 and place == 1 else 0 for place in range(stride)]
    others = sum(int((head[place::stride] > most[place]).sum()) for place in range(1, stride))
    return ids >= _FEWEST and others <= 0.01 * ids
