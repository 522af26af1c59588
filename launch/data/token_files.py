"""Token files read where they lie: memory-mapped, with an index of where documents end.

The index is built once, file by file, and kept beside the description; each part gets its name when it is complete.
Its name contains a digest of the file's path, size and modification time, and of dtype, eos and vocabulary: a file that
has changed is read anew, and only that one. A document ends with eos. What follows the last eos of a file is a document
as well, and an eos is put behind it when it is read, as ``prepare_data.py`` does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import numpy as np

from launch.data.mixture import Mixture, Source
from launch.prep import DataError
from launch.prep.sources import open_tokens
from launch.prep.widths import check_width
from launch.progress import Progress

__all__ = ["TokenFiles", "build_index"]

FORMAT = 1
"""Version of the index files."""
_CHUNK = 1 << 22  # tokens looked at in one go: a few arrays of this length are in memory
_LONGEST = np.iinfo(np.int32).max  # of a document: Megatron's indices hold lengths in int32


class TokenFiles:
    """One source, as Megatron's GPTDataset wants its low-level data set. Tokens stay in the files.

    Args:
        source: from a mixture.
        eos: ends documents.
        index: file that :func:`build_index` has written.

    Raises:
        DataError: the index is not there.
    """

    def __init__(self, source: Source, eos: int, index: Path) -> None:
        self.path_prefix = str(index)
        self._files, self._dtype, self._eos = source.files, source.dtype, eos
        try:
            content = np.load(index, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"cache_dir: {index} is not there although rank 0 wrote it, accepted: a folder that all nodes share"
            ) from None
        self._starts = np.concatenate([[0], np.cumsum(content[: len(source.files)])])
        """Where files begin, in tokens, the eos that is put behind some included; int64 ``[files + 1]``."""
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
        """``length`` tokens of document ``idx`` from ``offset`` on, or all that follow, in the files' dtype."""
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


@functools.lru_cache(maxsize=256)  # each map holds a file descriptor, of which a process may have 1024
def _mapped(path: str, dtype: str | None) -> np.ndarray:
    return open_tokens(path, None if dtype is None else np.dtype(dtype), option=None)


def build_index(mixture: Mixture, folder: str | os.PathLike, quiet: bool = False) -> list[Path]:
    """Find the documents of all sources; files whose index is in ``folder`` are not read again. On one rank.

    Args:
        folder: of the index, there already.
        quiet: no progress.

    Returns:
        A file for each source, for :class:`TokenFiles`: int64 ``[files + documents + 1]``, the lengths of the files
        and where documents begin.

    Raises:
        DataError: names the file, and the token in it, that cannot be right.
    """
    folder = Path(folder)
    parts = [
        [folder / f"{_digest(mixture, source, file)}.ends.npy" for file in source.files] for source in mixture.sources
    ]
    whole = [
        folder / f"{hashlib.sha256(' '.join(part.name for part in of).encode()).hexdigest()[:32]}.documents.npy"
        for of in parts
    ]
    missing = [n for n, path in enumerate(whole) if not _is_whole(path)]
    todo = [
        (mixture.sources[n], file, part)
        for n in missing
        for file, part in zip(mixture.sources[n].files, parts[n], strict=True)
        if not _is_whole(part)
    ]
    workers = min(8, os.cpu_count() or 1)
    with (
        Progress(sum(os.path.getsize(file) for _, file, _ in todo), "index", unit="B", quiet=quiet) as progress,
        ThreadPoolExecutor(workers) as pool,  # comparing long arrays leaves Python's lock to others
    ):
        futures = {pool.submit(_index_file, mixture, source, file, part): file for source, file, part in todo}
        try:
            for future in as_completed(futures):
                future.result()
                progress.update(os.path.getsize(futures[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for n in missing:
        _join(parts[n], whole[n])
    return whole


def _digest(mixture: Mixture, source: Source, file: str) -> str:
    info = os.stat(file)
    about = [FORMAT, file, info.st_size, info.st_mtime_ns, source.dtype, mixture.eos, mixture.vocab_size]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    try:
        return len(np.load(path, mmap_mode="r", allow_pickle=False)) > 0
    except (OSError, ValueError, EOFError):  # not there, or cut by a full disk
        return False


def _save(path: Path, values: np.ndarray) -> None:
    """Write an array under a name of its own, and rename it when it is on disk."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep other users of the data out
        os.replace(temporary, path)
    except OSError as problem:
        raise DataError(f"cache_dir: cannot write {path} ({problem.strerror}), accepted: a folder with room") from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _index_file(mixture: Mixture, source: Source, file: str, part: Path) -> None:
    """Write where the documents of one file end, in tokens: int64 ``[documents]``."""
    where = f"data: {mixture.path}: {source.name}: {file}"
    tokens = open_tokens(file, None if source.dtype is None else np.dtype(source.dtype), option=None)
    _check_type(tokens[:_CHUNK], mixture.vocab_size, where)
    ends: list[np.ndarray] = []
    for at in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[at : at + _CHUNK])
        if int(chunk.max()) >= mixture.vocab_size or int(chunk.min()) < 0:
            wrong = int(np.flatnonzero((chunk >= mixture.vocab_size) | (chunk < 0))[0])
            raise DataError(
                f"{where}: token {at + wrong} is {int(chunk[wrong])}, accepted: ids from 0 to "
                f"{mixture.vocab_size - 1} (vocab_size {mixture.vocab_size})"
            )
        ends.append(at + 1 + np.flatnonzero(chunk == mixture.eos))
    found = np.concatenate(ends).astype(np.int64)
    if not len(found):
        raise DataError(
            f"{where}: eos {mixture.eos} does not occur in its {len(tokens)} tokens, accepted: the id that ends "
            "documents there"
        )
    if found[-1] < len(tokens):
        found = np.append(found, len(tokens) + 1)  # with the eos that is put behind them
    longest = int(np.diff(found, prepend=0).max())
    if longest > _LONGEST:
        raise DataError(f"{where}: holds a document of {longest} tokens, accepted: {_LONGEST} at most")
    _save(part, found)


def _check_type(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuse numbers of another width than they are read with, where that shows.

    Wider ones show by their zeros. Ids of two bytes read as four show values far above the vocabulary whose halves are
    ids.
    """
    check_width(tokens, where)
    if tokens.itemsize == 4 and len(tokens) >= 4:
        halves = np.asarray(tokens).view(np.uint16)
        if float((tokens >= vocab_size).mean()) > 0.9 and int(halves.max()) < vocab_size:
            raise DataError(
                f"{where}: its tokens are beyond vocab_size {vocab_size} when they are read as {tokens.dtype}, "
                "accepted: its real dtype, which looks like uint16"
            )


def _join(parts: Sequence[Path], whole: Path) -> None:
    """Write the index of a source from those of its files."""
    ends = [np.load(part, allow_pickle=False) for part in parts]
    sizes = np.asarray([int(of[-1]) for of in ends], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shifted = [of + start for of, start in zip(ends, starts, strict=False)]
    _save(whole, np.concatenate([sizes, [0], *shifted]))
