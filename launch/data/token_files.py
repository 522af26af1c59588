"""Token files read where they lie: memory-mapped, with an index of where documents end.

The index is built once, file by file, and kept beside the description. The name of each part is a
digest of the file's path, size and modification time, and of dtype, eos and vocabulary: only a file
that has changed is read again. A document ends with eos. What follows the last eos of a file is
one, too, and gets an eos when it is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from launch.common.errors import DataError
from launch.common.progress import Progress
from launch.data.mixture import Mixture, Source
from launch.data.shards import replacing

FORMAT = 1  # version of the index files
_CHUNK = 1 << 22  # tokens compared in one go: a few arrays of this length are in memory


def cache_folder(prefixes: Sequence[str], cache_dir: str | None) -> str:
    """A folder for indices that can be written: the one asked for, else beside the data, else
    the user's.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folders = [Path(f"{prefixes[0]}.cache"), home / "coat_dist"]
    if cache_dir:
        folders = [Path(cache_dir)]
    failed = ""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return str(folder)
        except OSError as problem:
            failed = f"{folder} ({problem.strerror})"
    raise DataError(f"cache_dir: cannot write to {failed}, accepted: a folder that can be written")


class TokenFiles:
    """One source, as Megatron's GPTDataset wants its low-level data set. Tokens stay in the files.

    Args:
        source: from a mixture.
        index: of the source, from :func:`build_index`.
    """

    def __init__(self, source: Source, index: Path) -> None:
        self.path_prefix = str(index)
        self._files, self._dtype, self._eos = source.files, source.dtype, source.eos
        content = np.load(index, mmap_mode="r")
        self._starts = np.concatenate([[0], np.cumsum(content[: len(source.files)])])
        """Where files begin, in tokens, the eos that is put behind some included; int64 ``[files
        + 1]``.
        """
        self._bounds = content[len(source.files) :]
        """Where documents begin, the same way; int64 ``[documents + 1]``, memory-mapped."""
        self.sequence_lengths = np.diff(self._bounds).astype(np.int32)
        """Tokens of documents, int32 ``[documents]``."""

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self._starts[-1])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` tokens of document ``idx`` from ``offset`` on, or all that follow, in the
        files' dtype.
        """
        if length is None:
            length = int(self.sequence_lengths[idx]) - offset
        begin = int(self._bounds[idx]) + offset
        number = int(np.searchsorted(self._starts, begin, "right")) - 1
        begin -= int(self._starts[number])
        mapped = _mapped(self._files[number], self._dtype)
        tokens = np.asarray(mapped[begin : begin + length])
        if len(tokens) < length:  # a file that does not end with eos
            tokens = np.append(tokens, np.asarray([self._eos], tokens.dtype))
        return tokens


# Each map holds a file descriptor, and a process may have 1024 of them.
@functools.lru_cache(maxsize=256)
def _mapped(path: str, dtype: str | None) -> np.ndarray:
    return open_tokens(path, None if dtype is None else np.dtype(dtype))


def build_index(mixture: Mixture, folder: str | os.PathLike) -> list[Path]:
    """Find the documents of all sources; files whose index is in ``folder`` are not read again. On
    one rank.

    Returns:
        A file for each source, for :class:`TokenFiles`: int64 ``[files + documents + 1]``, the
        lengths of the files and where documents begin.

    Raises:
        DataError: names the file, and the token in it, that cannot be right.
    """
    found: list[Path] = []
    joined: dict[Path, list[Path]] = {}
    todo: list[tuple[Source, str, Path]] = []
    for source in mixture.sources:
        parts = [Path(folder, f"{_digest(source, file)}.ends.npy") for file in source.files]
        names = " ".join(part.name for part in parts)
        found.append(
            Path(folder, f"{hashlib.sha256(names.encode()).hexdigest()[:32]}.documents.npy")
        )
        if not found[-1].exists():
            joined[found[-1]] = parts
            files = zip(source.files, parts, strict=True)
            todo += [(source, file, part) for file, part in files if not part.exists()]
    with (
        Progress(sum(os.path.getsize(file) for _, file, _ in todo), "index", unit="B") as progress,
        # Comparing long arrays leaves Python's lock to others.
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
        for file in pool.map(lambda one: _index_file(mixture, *one), todo):
            progress.update(os.path.getsize(file))
    for whole, parts in joined.items():
        ends = [np.load(part) for part in parts]
        sizes = [int(of[-1]) for of in ends]
        starts = np.cumsum([0, *sizes[:-1]])
        _save(
            whole,
            np.concatenate(
                [sizes, [0], *(of + start for of, start in zip(ends, starts, strict=True))]
            ),
        )
    return found


def _digest(source: Source, file: str) -> str:
    info = os.stat(file)
    about = [
        FORMAT,
        file,
        info.st_size,
        info.st_mtime_ns,
        source.dtype,
        source.eos,
        source.vocab_size,
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _index_file(mixture: Mixture, source: Source, file: str, part: Path) -> str:
    """Write where the documents of one file end, in tokens: int64 ``[documents]``; the file."""
    where = f"data: {mixture.path}: {source.name}: {file}"
    try:
        tokens = _mapped(file, source.dtype)
    except DataError as problem:
        raise DataError(f"{where.removesuffix(file)}{problem}") from None
    check_width(tokens, where)
    ends = [np.empty(0, np.int64)]
    for at in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[at : at + _CHUNK])
        if int(chunk.max()) >= source.vocab_size or int(chunk.min()) < 0:
            wrong = int(np.flatnonzero((chunk >= source.vocab_size) | (chunk < 0))[0])
            accepted = f"ids from 0 to {source.vocab_size - 1} (vocab_size {source.vocab_size})"
            raise DataError(
                f"{where}: token {at + wrong} is {int(chunk[wrong])}, accepted: {accepted}"
            )
        ends.append(at + 1 + np.flatnonzero(chunk == source.eos))
    found = np.concatenate(ends)
    if not len(found):
        tokens_there = f"eos {source.eos}, which is not among its {len(tokens)} tokens"
        raise DataError(f"{where}: got {tokens_there}, accepted: the id that ends documents there")
    if found[-1] < len(tokens):
        found = np.append(found, len(tokens) + 1)  # with the eos that is put behind them
    _save(part, found)
    return file


def _save(path: Path, values: np.ndarray) -> None:
    with replacing(path) as temporary, open(temporary, "wb") as out:
        np.save(out, values)


def open_tokens(path: str, dtype: np.dtype | None) -> np.ndarray:
    """Map a token file: a NumPy array file, or bare numbers (Dolma ships those under the name .npy
    too).

    Raises:
        DataError: not one-dimensional, of another type than ``dtype``, or not a whole number of
            tokens.
    """
    with open(path, "rb") as file:
        numpy_file = file.read(6) == b"\x93NUMPY"
    if numpy_file:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        accepted = [np.uint16, np.uint32, np.int32] if dtype is None else [dtype]
        if tokens.ndim != 1 or tokens.dtype not in accepted:
            names = ", ".join(np.dtype(one).name for one in accepted)
            raise DataError(
                f"{path}: got {tokens.dtype} of shape {tokens.shape}, accepted: one dimension of "
                f"{names}"
            )
        return tokens
    size = os.path.getsize(path)
    if dtype is None or size % dtype.itemsize:
        known = "no dtype" if dtype is None else f"dtype {dtype}"
        raise DataError(
            f"{path}: got {size} bytes without a header and {known}, accepted: whole uint16 or "
            "uint32"
        )
    if not size:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def check_width(tokens: np.ndarray, where: str) -> None:
    """Refuse ids of 4 or 8 bytes that are read with fewer, which would be trained on without an
    error.

    Then every second token is the upper part of an id, about 0. Zeros that ids have themselves
    (padding, or an end of documents) fall on all places alike.
    """
    head = np.asarray(tokens[: 1 << 22])
    ids = int((head[::2] > 3).sum())  # 0 to 3: padding and similar ids
    # Ids of 4 bytes are below 2^18.
    upper = int((head[1::2] > (3 if head.itemsize == 2 else 0)).sum())
    if ids >= 16 and upper <= 0.01 * ids:
        raise DataError(
            f"{where}: got {head.dtype} tokens, every second about 0, accepted: their real, wider "
            "dtype"
        )
