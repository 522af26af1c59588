"""Checksums taken beside reading and writing: CRC-32 of what is in memory, by a thread of its own.

``zlib.crc32`` lets other threads run, and sums 1 to 2 GB a second: in turns with reading or writing it would cost as
much time as a disk.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch

__all__ = ["bytes_of", "summed", "taken"]

_THREAD = ThreadPoolExecutor(1, "crc32")  # started by the first call


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's are buffers


def summed(tensor: torch.Tensor) -> Future[int]:
    """CRC-32 of a contiguous tensor, which keeps it: :func:`taken` gives it without summing once more. Nobody may
    write into the tensor afterwards."""
    tensor.coat_crc32 = found = _THREAD.submit(zlib.crc32, bytes_of(tensor))  # type: ignore[attr-defined]
    return found


def taken(tensor: torch.Tensor) -> Future[int]:
    """CRC-32 of a contiguous tensor."""
    return getattr(tensor, "coat_crc32", None) or summed(tensor)
