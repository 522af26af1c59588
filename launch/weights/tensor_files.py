"""Tensors in safetensors files, read by byte ranges: nothing is mapped or kept, so memory is what the caller holds.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length, little-endian; the header,
JSON, ``{name: {"dtype", "shape", "data_offsets"}}`` with offsets from the header's end; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coat_dist.checkpoint.manifest import MANIFEST
from coat_dist.checkpoint.write.engine_writes import join
from launch.weights.source import CheckpointError
from launch.weights.sums import bytes_of, summed

__all__ = ["CODES", "Entry", "TensorFiles", "read_header"]

CODES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
"""Types of weights, as the format spells them."""
_READ_AHEAD = 1 << 17  # Linux cuts longer requests to what the device takes at once, whatever that is
_LARGEST_HEADER = 100_000_000  # the format's own bound


class Entry(NamedTuple):
    """Where a tensor is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Of its bytes, in the file."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """Tensors of one or several safetensors files.

    Args:
        entries: see :func:`read_header`.
        checksums: CRC-32 by name; a tensor whose rows were all read, in whichever order, is compared with it.
    """

    def __init__(self, entries: Mapping[str, Entry], checksums: Mapping[str, int] | None = None) -> None:
        self.entries = dict(entries)
        self._checksums = checksums or {}
        self._so_far: dict[str, dict[int, tuple[int, Future[int]]]] = {}
        self._open: tuple[Path, int] | None = None

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor's first dimension.

        Raises:
            CheckpointError: the file cannot be read, ends too early, or holds other bytes than were written.
        """
        entry = self.entries[name]
        width = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        raw = torch.empty((stop - start) * width, dtype=torch.uint8)
        view = bytes_of(raw)
        try:
            descriptor, done = self._descriptor(entry.file), 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], entry.start + start * width + done)
                if not got:
                    raise CheckpointError(f"{entry.file}: ends within tensor {name}: it is cut off")
                done += got
        except OSError as problem:
            raise CheckpointError(f"{entry.file}: tensor {name} cannot be read ({problem})") from problem
        rows = raw.view(entry.dtype).view(stop - start, *entry.shape[1:])
        if name in self._checksums:
            self._check(name, entry, start, stop, summed(rows))
        return rows

    def prefetch(self, name: str) -> None:
        """Let the system begin to read a tensor. It reads ahead by itself where one place is read on and on; rows of
        queries, keys and values are three places in turns, and a disk is far from its speed then."""
        entry = self.entries[name]
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):
            descriptor, end = self._descriptor(entry.file), entry.start + entry.bytes
            for start in range(entry.start, end, _READ_AHEAD):
                os.posix_fadvise(descriptor, start, min(_READ_AHEAD, end - start), os.POSIX_FADV_WILLNEED)

    def _check(self, name: str, entry: Entry, start: int, stop: int, checksum: Future[int]) -> None:
        """Compare with the checksum as soon as every row has been read, in whichever order."""
        parts = self._so_far.setdefault(name, {})
        if start == 0 or start in parts:  # read anew
            parts.clear()
        parts[start] = (stop, checksum)
        if sum(end - first for first, (end, _) in parts.items()) < entry.shape[0]:
            return
        del self._so_far[name]
        found, width = 0, entry.bytes // max(entry.shape[0], 1)
        for first, (end, one) in sorted(parts.items()):
            found = join(found, one.result(), (end - first) * width)
        if found != self._checksums[name]:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is not what was written, by the checksum in "
                f"{entry.file.parent / MANIFEST} (remove that file if the tensors were changed on purpose)"
            )

    def _descriptor(self, file: Path) -> int:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, os.open(file, os.O_RDONLY))
        return self._open[1]

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    __del__ = close


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: it is no such file, is cut off, or holds a tensor of a type that weights cannot have, or bytes
            that are no tensor's or two's.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise CheckpointError(f"{file}: is no safetensors file, or cut off ({size} bytes)")
            header: Any = json.loads(opened.read(length))
        if not isinstance(header, dict):
            raise ValueError("no JSON object")
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(f"{file}: its header cannot be read ({problem}), accepted: a safetensors file") from None
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem})") from problem
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}
    _check_places(file, entries, 8 + length, size)
    return entries


def _check_places(file: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Whether every byte from ``start`` on is one tensor's, as the format has it."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != start:
            raise CheckpointError(
                f"{file}: tensor {name} begins at byte {entry.start}, accepted: {start}, where the one before ends"
            )
        start += entry.bytes
    if start < size:
        raise CheckpointError(f"{file}: has more bytes than its tensors, accepted: a file as it was written")


def _entry(file: Path, name: str, value: Any, base: int, size: int) -> Entry:
    try:
        code, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file}: tensor {name}: its entry in the header is damaged")
    if code not in CODES:
        raise CheckpointError(f"{file}: tensor {name}: got type {code}, accepted: {', '.join(CODES)}")
    entry = Entry(file, CODES[code], shape, base + start)
    if entry.bytes != stop - start:
        raise CheckpointError(
            f"{file}: tensor {name}: got {stop - start} bytes, accepted: {entry.bytes}, those of {list(shape)} {code}"
        )
    if base + stop > size:
        raise CheckpointError(
            f"{file}: tensor {name} ends at byte {base + stop}, and the file at {size}: it is cut off"
        )
    return entry
