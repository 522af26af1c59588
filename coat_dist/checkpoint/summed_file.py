"""Files whose checksum is known when they are written, and which are on disk when they are closed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from .durable import named

__all__ = ["SummedFile"]

_SYNC_EVERY = 1 << 26
"""Bytes after which the disk is set to work, while the rest is still being made."""
_BESIDE = 1 << 20
"""From this many bytes on, one thread sums while the other writes."""
_PIECE = 1 << 24
"""Bytes written at once."""


class SummedFile:
    """A new file for ``torch.save``: sums what it is given while it writes, and lets the disk begin early.

    After a failed write the rest is counted and not written, so that an error can say how much room is needed;
    :meth:`close` raises it. It has no descriptor to offer: ``torch.save`` would write around it.

    Attributes:
        size: bytes given to it.
        checksum: CRC-32 of these.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.checksum = path, 0, 0
        self._problem: OSError | None = None
        self._unsynced = 0
        self._syncing: Future[None] | None = None
        self._file = path.open("wb", buffering=0)
        self._summing, self._disk = (ThreadPoolExecutor(1) for _ in range(2))

    def write(self, data: Any) -> int:
        """All of ``data``; a later error is raised by :meth:`close`."""
        whole = memoryview(data).cast("B")
        self.size += len(whole)
        if len(whole) < _BESIDE:
            self.checksum = zlib.crc32(whole, self.checksum)
            self._write(whole)
            return len(whole)
        summed = self._summing.submit(zlib.crc32, whole, self.checksum)
        for start in range(0, len(whole), _PIECE):
            self._write(whole[start : start + _PIECE])
        self.checksum = summed.result()  # before returning: the memory is the caller's
        return len(whole)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            OSError: of any write or sync; names the file.
        """
        self._finish_sync()
        if self._problem is None:
            self._try(lambda: os.fsync(self._file.fileno()))
        self._try(self._file.close)
        self._summing.shutdown()
        self._disk.shutdown()
        if self._problem is not None:
            raise named(self._problem, self.path) from self._problem

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, view: memoryview) -> None:
        if self._problem is not None:
            return
        try:
            while view:
                written = self._file.write(view)  # the system may take less than it is given
                view = view[written:]
                self._unsynced += written
        except OSError as problem:
            self._problem = problem
            return
        if self._unsynced >= _SYNC_EVERY and (self._syncing is None or self._syncing.done()):
            self._finish_sync()
            self._unsynced = 0
            self._syncing = self._disk.submit(os.fdatasync, self._file.fileno())

    def _finish_sync(self) -> None:
        """Take the result of the last sync: the system tells of an error once."""
        if self._syncing is not None:
            self._try(self._syncing.result)
            self._syncing = None

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as problem:
            self._problem = self._problem or problem
