"""Memory-mapped files: pages that were read count as the process's memory until they are given back."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

__all__ = ["forget"]

_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4


def forget(mapped: torch.Tensor) -> None:
    """Give back the pages of a tensor that lies in a memory-mapped file and was not written to.

    Reading it again reads the file again. A tensor that lies elsewhere is left alone, and so is everything on other
    systems than Linux.
    """
    page, begin = mmap.PAGESIZE, mapped.data_ptr()
    start, stop = -(-begin // page) * page, (begin + mapped.numel() * mapped.element_size()) // page * page
    if stop > start and _in_a_file(start, stop):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def _in_a_file(start: int, stop: int) -> bool:
    """Whether these addresses are one mapping of a file: of other memory the content would be lost."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in addresses.split("-"))
        if low <= start < high:
            return stop <= high and inode != "0"
    return False
