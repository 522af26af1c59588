"""Memory-mapped files: pages that were read count as the process's memory until they are given back."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

__all__ = ["forget"]

_MADV_DONTNEED = 4


def forget(mapped: torch.Tensor) -> None:
    """Give back the pages of a tensor that was read from a memory-mapped file and not written to.

    The file stays, and so does what reading gives; on other systems than Linux nothing happens. Must not be called for
    a tensor in ordinary memory: its content would be lost.
    """
    storage = mapped.untyped_storage()
    if not sys.platform.startswith("linux") or not storage.filename:
        return
    page = mmap.PAGESIZE
    start = -(-mapped.data_ptr() // page) * page
    stop = (mapped.data_ptr() + mapped.numel() * mapped.element_size()) // page * page
    if stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)
