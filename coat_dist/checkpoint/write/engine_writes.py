"""DeepSpeed's writing during a save: checksums taken on the way to the disk, errors kept until all ranks hear of them.

``engine.save_checkpoint`` meets the other ranks after writing, so a rank that left it early would let them hang. For
the time of a save some methods of the engine are therefore replaced on its instance.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from .durable import named

__all__ = ["SummedFile", "Writes", "watch_writes"]

_LARGE = 1 << 20
"""From this many bytes on, a second thread sums data while they are written."""
_PIECE = 1 << 26
"""Bytes written at once; after each the disk is set to work."""


@dataclass
class Writes:
    """What one rank wrote in one save."""

    sums: dict[str, list[int]] = field(default_factory=dict)
    """[bytes, CRC-32] of each file that went through the checkpoint engine, by its absolute path."""
    errors: list[Exception] = field(default_factory=list)
    """Those of writing; the save went on after each."""


@contextmanager
def watch_writes(engine: Any) -> Iterator[Writes]:
    """Sum what DeepSpeed's engine saves meanwhile, and keep the errors of writing instead of raising them."""
    writes = Writes()
    zipped = getattr(engine.checkpoint_engine, "zipfile_serialization", None)

    def keeping(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except Exception as error:  # a value that cannot be pickled may raise anything
                path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
                text = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
                kept = OSError(f"{path}: {text}")
                kept.__cause__ = error
                writes.errors.append(kept)
                return None

        return attempt

    def save(state_dict: Any, path: str) -> None:
        file = SummedFile(Path(path))
        try:
            torch.save(state_dict, cast(IO[bytes], file), _use_new_zipfile_serialization=bool(zipped))
        finally:
            file.close()
        writes.sums[os.path.abspath(path)] = [file.size, file.checksum]

    places = [
        (engine.checkpoint_engine, "save", save if isinstance(zipped, bool) else None),
        (engine.checkpoint_engine, "makedirs", None),
        (engine, "_copy_recovery_script", None),
        # What these gather, such as the caller's state_dict hooks, may raise too; there are no collectives in them.
        (engine, "_save_checkpoint", None),
        (engine, "_save_zero_checkpoint", None),
    ]
    before = [vars(owner).get(name) for owner, name, _ in places]
    for owner, name, other in places:
        setattr(owner, name, keeping(other or getattr(owner, name)))
    try:
        yield writes
    finally:
        for (owner, name, _), own in zip(places, before, strict=True):
            delattr(owner, name) if own is None else setattr(owner, name, own)  # without one, its class's is found


class SummedFile:
    """A new file for ``torch.save`` whose CRC-32 is taken while it is written, and which lets the disk begin early.

    It has no descriptor to offer: ``torch.save`` would write around it.

    Attributes:
        size: bytes written.
        checksum: their CRC-32.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.checksum = path, 0, 0
        self._problem: OSError | None = None
        self._file = path.open("wb", buffering=0)
        self._threads = ThreadPoolExecutor(2)

    def write(self, data: Any) -> int:
        """Write all of ``data``. After an error the rest is dropped: ``torch.save`` would hide what is raised here."""
        whole = memoryview(data).cast("B")
        large = len(whole) >= _LARGE
        summed = self._threads.submit(zlib.crc32, whole, self.checksum) if large else None
        for start in range(0, len(whole), _PIECE):
            self._write(whole[start : start + _PIECE])
            if large and self._problem is None:
                # Linux then begins to write to the disk. It may wait, so in a thread; errors come with fsync.
                self._threads.submit(os.posix_fadvise, self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.checksum = zlib.crc32(whole, self.checksum) if summed is None else summed.result()
        self.size += len(whole)
        return len(whole)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            OSError: of any write or sync; names the file.
        """
        self._threads.shutdown()
        try:
            with self._file:
                if self._problem is None:
                    os.fsync(self._file.fileno())
        except OSError as problem:
            self._problem = self._problem or problem
        if self._problem is not None:
            raise named(self._problem, self.path) from self._problem

    def _write(self, view: memoryview) -> None:
        if self._problem is not None:
            return
        try:
            while view:
                view = view[self._file.write(view) :]  # the system may take less than it is given
        except OSError as problem:
            self._problem = problem
