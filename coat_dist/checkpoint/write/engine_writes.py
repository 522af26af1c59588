"""DeepSpeed's writing during a save: checksums taken on the way to the disk, errors kept until all ranks can hear.

``engine.save_checkpoint`` meets the other ranks after writing: a rank that left it early would let them wait. So for
the time of a save some methods of the engine are replaced on its instances, and put back.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import torch

from ...optim.state import CODE_KEYS
from .durable import named

__all__ = ["SummedFile", "Writes", "join", "watch_writes"]

_LARGE = 1 << 20
"""From this many bytes on, data are not summed if the file will say their checksum."""
_PIECE = 1 << 26
"""Bytes written at once; after each the disk is set to work."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Linux's; elsewhere the disk begins when the system pleases."""
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23
"""The polynomials 1 and x^8: in a CRC-32 the highest bit is the coefficient of x^0."""


@dataclass
class Writes:
    """What one rank wrote in one save."""

    sums: dict[str, list[int]] = field(default_factory=dict)
    """[bytes, CRC-32] of each file that went through the checkpoint engine, by its absolute path."""
    errors: list[Exception] = field(default_factory=list)
    """Those of writing; the save went on after each."""
    size: int = 0
    """Bytes that were to be written, also those for which there was no room."""

    def torch_save(self, state: Any, path: str, zipped: bool) -> None:
        """``torch.save``, as DeepSpeed calls it."""
        state = _with_a_name_for_readers(state)
        file = SummedFile(Path(path), zipped and torch.serialization.get_crc32_options())
        try:
            torch.save(state, cast(IO[bytes], file), _use_new_zipfile_serialization=zipped)
        finally:
            self.size += file.size
            file.close()
        if file.checksum is not None:
            self.sums[os.path.abspath(path)] = [file.size, file.checksum]


def _with_a_name_for_readers(state: Any) -> Any:
    """Optimizer states whose FP8 moments, looked up under AdamW's keys, name the tool that decodes them.

    ``deepspeed.checkpoint.ds_to_universal`` looks for "exp_avg" in every state, in processes of its own that import
    nothing of this package. Only the standard library is pickled.
    """
    outer: Any = state.get("optimizer_state_dict") if isinstance(state, dict) else None
    for key in ("base_optimizer_state", "optimizer_state_dict") if isinstance(outer, dict) else ():
        inner: Any = outer.get(key)
        states = inner.get("state") if isinstance(inner, dict) else None
        if isinstance(states, dict) and any(isinstance(s, dict) and CODE_KEYS[0] in s for s in states.values()):
            missing = functools.partial(operator.getitem, {}, _DECODED_BY)  # raises a KeyError that says so
            named = {k: defaultdict(missing, s) if isinstance(s, dict) else s for k, s in states.items()}
            return {**state, "optimizer_state_dict": {**outer, key: {**inner, "state": named}}}
    return state


_DECODED_BY = (
    "exp_avg: CoatAdamW's moments are stored in 8 bits; convert this checkpoint with launch/to_universal.py or "
    "coat_dist.convert_to_universal"
)


@contextmanager
def watch_writes(engine: Any, temporary: Path | None = None) -> Iterator[Writes]:
    """Sum what the engine saves meanwhile, and keep the errors of writing instead of raising them.

    Args:
        engine: DeepSpeed's.
        temporary: a folder in which scripts are made that DeepSpeed copies beside checkpoints (``zero_to_fp32.py``).
    """
    writes = Writes()
    zipped = getattr(engine.checkpoint_engine, "zipfile_serialization", None)

    def keeping(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except Exception as error:  # of any kind: a value that cannot be pickled raises what it likes
                path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
                text = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
                told = OSError(f"{path}: {text}")
                told.__cause__ = error
                writes.errors.append(told)
                return None

        return attempt

    def save(state_dict: Any, path: str) -> None:
        writes.torch_save(state_dict, path, bool(zipped))

    copy = engine._copy_recovery_script

    def copy_whole(folder: str) -> None:
        copy(str(temporary))
        for script in temporary.glob("*.py"):  # type: ignore[union-attr]
            os.replace(script, Path(folder) / script.name)

    places = [
        (engine.checkpoint_engine, "save", save if isinstance(zipped, bool) else None),
        (engine.checkpoint_engine, "makedirs", None),
        (engine, "_copy_recovery_script", None if temporary is None else copy_whole),
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
        self._disk = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """All of ``data``; a later error is raised by :meth:`close`."""
        whole = memoryview(data).cast("B")
        length, (place, before, checksum) = len(whole), self._parts[-1]
        if self.zipped and length >= _LARGE:
            self._parts.append((self.size, length, None))
        elif checksum is None:
            self._parts.append((self.size, length, zlib.crc32(whole)))
        else:
            self._parts[-1] = (place, before + length, zlib.crc32(whole, checksum))
        self.size += length
        for start in range(0, length, _PIECE):
            self._write(whole[start : start + _PIECE])
            if length >= _LARGE and _sync_file_range is not None and self._problem is None:
                # It may wait, so in a thread; errors come with fsync.
                self._disk.submit(_sync_file_range, self._file.fileno(), 0, 0, _SYNC_FILE_RANGE_WRITE)
        return length

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            OSError: of any write or sync; names the file.
        """
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
                records = _stored_records(self.path)
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


def _stored_records(path: Path) -> dict[int, tuple[int, int]]:
    """Bytes and CRC-32 of the records of a zip file that are not compressed, as its directory has them, by the place
    in the file at which a record's data begin."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_STORED:
                file.seek(record.header_offset + 26)  # lengths of name and of the field behind it
                lengths = file.read(4)
                start = record.header_offset + 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
                found[start] = (record.file_size, record.CRC)
    return found


def join(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces, one behind the other, from those of each; ``length``: bytes of the second."""
    return _product(_zeros(length), first) ^ second


@functools.lru_cache(1024)
def _zeros(length: int) -> int:
    """x^(8 * length): multiplying a CRC-32 by it counts ``length`` zero bytes behind what was summed."""
    power, square = _ONE, _X8
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two polynomials over GF(2), modulo CRC-32's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
