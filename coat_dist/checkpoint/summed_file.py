"""Files whose checksum is known when they are written, and which are on disk when they are closed."""

from __future__ import annotations

import ctypes
import os
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from .checksums import join, stored_records
from .durable import named

__all__ = ["SummedFile"]

_LARGE = 1 << 20
"""From this many bytes on, data are not summed here if the file will say their checksum, or else in another thread."""
_PIECE = 1 << 26
"""Bytes written at once; after each the disk is set to work."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Linux's; elsewhere the disk begins when the system pleases."""
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class SummedFile:
    """A new file for ``torch.save`` that knows its checksum when it is closed, and lets the disk begin early.

    After a failed write the rest is counted and not written, so that an error can say how much room is needed;
    :meth:`close` raises it. It has no descriptor to offer: ``torch.save`` would write around it.

    Attributes:
        size: bytes given to it.
        checksum: CRC-32 of these, when it is closed; None where that must be found by reading the file.
    """

    def __init__(self, path: Path, zipped: bool = False) -> None:
        """``zipped``: it will be a zip file whose directory holds checksums, as ``torch.save`` takes them anyway."""
        self.path, self.size, self.zipped = path, 0, zipped
        self.checksum: int | None = 0
        self._problem: OSError | None = None
        self._parts: list[tuple[int, int, int | None]] = [(0, 0, 0)]  # place, bytes, CRC-32 where it is known yet
        self._file = path.open("wb", buffering=0)
        self._summing, self._disk = (ThreadPoolExecutor(1) for _ in range(2))

    def write(self, data: Any) -> int:
        """All of ``data``; a later error is raised by :meth:`close`."""
        whole = memoryview(data).cast("B")
        place, length = self.size, len(whole)
        self.size += length
        if length < _LARGE:
            start, before, sum_before = self._parts[-1]
            if sum_before is None:
                self._parts.append((place, length, zlib.crc32(whole)))
            else:
                self._parts[-1] = (start, before + length, zlib.crc32(whole, sum_before))
            self._write(whole)
            return length
        summed = None if self.zipped else self._summing.submit(zlib.crc32, whole)
        for start in range(0, length, _PIECE):
            self._write(whole[start : start + _PIECE])
            if _sync_file_range is not None and self._problem is None:  # may wait, so not here; errors come with fsync
                self._disk.submit(_sync_file_range, self._file.fileno(), 0, 0, _SYNC_FILE_RANGE_WRITE)
        self._parts.append((place, length, summed.result() if summed else None))  # now: the memory is the caller's
        return length

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            OSError: of any write or sync; names the file.
        """
        self._summing.shutdown()
        self._disk.shutdown()
        if self._problem is None:
            self._try(lambda: os.fsync(self._file.fileno()))
        self._try(self._file.close)
        if self._problem is not None:
            raise named(self._problem, self.path) from self._problem
        self.checksum = self._sum()

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, view: memoryview) -> None:
        if self._problem is not None:
            return
        try:
            while view:
                view = view[self._file.write(view) :]  # the system may take less than it is given
        except OSError as problem:
            self._problem = problem

    def _sum(self) -> int | None:
        records: dict[int, tuple[int, int]] = {}
        if any(checksum is None for *_, checksum in self._parts):
            try:
                records = stored_records(self.path)
            except (OSError, zipfile.BadZipFile):  # such as one whose saving failed
                return None
        whole = 0
        for place, length, checksum in self._parts:
            if checksum is None:
                size, checksum = records.get(place, (None, 0))
                if size != length:
                    return None
            whole = join(whole, checksum, length)
        return whole

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as problem:
            self._problem = self._problem or problem
