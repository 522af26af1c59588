"""Writing tensors into safetensors files as they come: a file's header is known before its first tensor is read.

One thread reads and converts, a second writes, a third sums and a fourth brings to disk what was written, so that only
the slowest of these takes time. What is in memory is a handful of blocks, less than the largest tensor.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from coat_dist.checkpoint.write.durable import named, write_text
from coat_dist.checkpoint.write.engine_writes import join
from launch.weights.source import CheckpointError
from launch.weights.sums import bytes_of, taken
from launch.weights.tensor_files import CODES

__all__ = ["Planned", "Written", "block_bytes", "write_tensors"]

SMALLEST, LARGEST = 1 << 22, 1 << 24
_WAITING = 2
_SYNC = 1 << 26  # bytes of a file; one fsync at its end would keep everything else waiting until the disk is ready
_SYNCS = 16  # that wait for the disk; each of a written file holds a descriptor, and there may be a thousand shards
_NAMES = {dtype: code for code, dtype in CODES.items()}


def block_bytes(largest: int) -> int:
    """How much is read, summed and written at a time: up to ten blocks are in memory at once, which are to be less than
    the largest tensor. Small ones cost time where processors are busy, as each goes through three threads.

    Args:
        largest: bytes of the largest tensor.
    """
    return min(max(largest // 16, SMALLEST), LARGEST)


class Planned(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Written:
    """What :func:`write_tensors` has written."""

    files: dict[str, list[int]] = field(default_factory=dict)
    """[bytes, CRC-32] by file."""
    tensors: dict[str, int] = field(default_factory=dict)
    """CRC-32 by tensor."""


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Sequence[Planned],
    blocks: Callable[[Planned], Iterator[torch.Tensor]],
    *,
    shard_bytes: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Written:
    """Write ``stem.safetensors``, or ``stem-00001-of-0000N.safetensors`` and ``stem.safetensors.index.json``.

    When this returns, the files are on disk; their names are not yet (see ``coat_dist/checkpoint/write/durable.py``).

    Args:
        folder: is there.
        stem: of the files' names.
        tensors: in the order in which they are written.
        blocks: gives a tensor's rows, in their order, in its dtype and in parts of any size.
        shard_bytes: most bytes of tensors in a file; a larger tensor has one for itself.
        progress: is told of bytes that were written, as they are.

    Raises:
        OSError: a file cannot be written; has its name.
        CheckpointError: ``blocks`` gave more or fewer bytes than a tensor has.
        Exception: what ``blocks`` raises.
    """
    shards = _shards(tensors, shard_bytes)
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [f"{stem}.safetensors"]
    written = Written()
    with _Writer(progress) as writer:
        for name, shard in zip(names, shards, strict=True):
            writer.open(folder / name, _header(shard))
            for tensor in shard:
                writer.begin(tensor)
                given = 0
                for block in blocks(tensor):
                    writer.put(block)
                    given += block.nbytes
                if given != tensor.bytes:  # all that follows would be out of place
                    raise CheckpointError(f"tensor {tensor.name}: got {given} bytes, accepted: {tensor.bytes}")
    written.files = {path.name: numbers for path, numbers in writer.files.items()}
    written.tensors = writer.tensors
    if len(shards) > 1:
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        content = {
            "metadata": {"total_size": sum(t.bytes for t in tensors)},
            "weight_map": dict(sorted(places.items())),
        }
        text = json.dumps(content, indent=2) + "\n"
        index = folder / f"{stem}.safetensors.index.json"
        write_text(index, text)
        written.files[index.name] = [len(text), zlib.crc32(text.encode())]
    return written


def _shards(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards


def _header(tensors: Sequence[Planned]) -> bytes:
    """A file's first bytes: the header's length and the header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    place = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.bytes],
        }
        place += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


class _Writer:
    """The thread that writes. An error of it is raised by the next call, or at the end."""

    def __init__(self, progress: Callable[[int], object]) -> None:
        self.files: Mapping[Path, list[int]] = {}
        self.tensors: dict[str, int] = {}
        self._progress = progress
        self._files: dict[Path, list[int]] = {}
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._problem: BaseException | None = None
        self._path, self._descriptor, self._tensor = Path(), -1, ""
        self._disk = ThreadPoolExecutor(1, "fsync")
        self._syncs: list[tuple[Path, Future[None]]] = []
        self._unsynced = 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._problem = self._problem or problem
        self._jobs.put(None)
        self._thread.join()
        self._disk.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if kind is None and self._problem is not None:
            raise self._problem
        self.files = self._files

    def open(self, path: Path, header: bytes) -> None:
        self._do(lambda: self._open(path, header))

    def begin(self, tensor: Planned) -> None:
        def begin() -> None:
            self._tensor = tensor.name
            self.tensors[tensor.name] = 0

        self._do(begin)

    def put(self, block: torch.Tensor) -> None:
        block = block if block.is_contiguous() else block.contiguous()
        checksum = taken(block)
        self._do(lambda: self._append(bytes_of(block), checksum))

    def _do(self, job: Callable[[], None]) -> None:
        if self._problem is not None:
            raise self._problem
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._attempt(job)
        self._attempt(self._finish)

    def _attempt(self, job: Callable[[], None]) -> None:
        if self._problem is None:
            try:
                job()
            except OSError as problem:
                self._problem = named(problem, self._path)
            except BaseException as problem:
                self._problem = problem

    def _finish(self) -> None:
        self._close()
        self._raise(all_=True)

    def _open(self, path: Path, header: bytes) -> None:
        self._close()
        self._path, self._files[path] = path, [0, 0]
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(memoryview(header))
        self._files[path] = [len(header), zlib.crc32(header)]

    def _append(self, view: memoryview, checksum: Future[int]) -> None:
        self._write(view)
        (size, so_far), found = self._files[self._path], checksum.result()
        self._files[self._path] = [size + len(view), join(so_far, found, len(view))]
        self.tensors[self._tensor] = join(self.tensors[self._tensor], found, len(view))
        self._unsynced += len(view)
        self._raise()
        if self._unsynced >= _SYNC and not self._syncs:
            self._sync(os.fsync)
        self._progress(len(view))

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done:])

    def _close(self) -> None:
        if self._descriptor >= 0:
            self._sync(_fsync_and_close)
            self._descriptor = -1

    def _sync(self, how: Callable[[int], None]) -> None:
        """Bring the open file to disk, beside what follows."""
        if len(self._syncs) >= _SYNCS:
            wait([self._syncs[0][1]])
            self._raise()
        self._syncs.append((self._path, self._disk.submit(how, self._descriptor)))
        self._unsynced = 0

    def _raise(self, all_: bool = False) -> None:
        """The error of a sync that has ended; of all, when they have."""
        while self._syncs and (all_ or self._syncs[0][1].done()):
            path, sync = self._syncs.pop(0)
            try:
                sync.result()
            except OSError as problem:
                raise named(problem, path) from problem


def _fsync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
