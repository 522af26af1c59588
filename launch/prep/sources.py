"""What ``prepare_data.py`` reads: finds input files and cuts them into shards of work.

A *shard* is a list of pieces, a *piece* a range of one file: bytes of a text or JSON-lines file, row groups of a
Parquet file, tokens of a token file. Ranges need not end where a document does: a document belongs to the range in
which it starts (documents.py reads them). Files and shards depend on the input alone, never on the number of workers,
so that results do not either.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.prep import DataError
from launch.prep.widths import check_width

__all__ = ["Piece", "Source", "cut_into_shards", "find", "open_parquet", "open_tokens"]

_TEXT = """txt text md rst tex py pyi pyx ipynb c h cc cpp cxx hpp cu cuh m java kt scala js jsx ts tsx go rs rb
php pl lua r jl swift cs hs ml sh bash sql html css xml yaml yml toml ini cfg cmake"""
TEXT_SUFFIXES = frozenset(f".{ending}" for ending in _TEXT.split())
DATA_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "gzip", ".json.gz": "gzip", ".parquet": "parquet"}
TOKEN_SUFFIXES = frozenset({".npy", ".bin"})
_LEAVE_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Source:
    """One input file. ``name`` identifies it independently of where the input folder lies."""

    path: str
    name: str
    kind: str  # text, jsonl, gzip, parquet, tokens
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """A range ``[start, stop)`` of a file: bytes (text, jsonl, gzip), row groups (parquet), tokens (tokens)."""

    path: str
    kind: str
    start: int
    stop: int
    size: int  # bytes of input, for the progress bar


def _kind(name: str, tokens: bool) -> str | None:
    name = name.lower()
    if tokens:
        return "tokens" if Path(name).suffix in TOKEN_SUFFIXES else None
    for suffix, kind in DATA_SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    return "text" if Path(name).suffix in TEXT_SUFFIXES else None


def accepted_suffixes(tokens: bool) -> str:
    """The file name endings that are read, as text for messages."""
    return " ".join(sorted(TOKEN_SUFFIXES if tokens else {*DATA_SUFFIXES, *TEXT_SUFFIXES}))


def _walk(root: Path, glob: str | None, tokens: bool, own: str | None, skipped: Counter) -> list[Source]:
    """Files of a folder that are to be read, in a fixed order; ``own`` is the absolute output prefix, never read."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _LEAVE_OUT]
        for file in files:
            path = Path(folder, file)
            if own is not None and os.path.abspath(path).startswith(f"{own}."):
                continue
            kind = _kind(file, tokens)
            if glob is not None:
                kind = (kind or ("tokens" if tokens else "text")) if fnmatch.fnmatch(file, glob) else None
            if kind is None or file.startswith("."):
                skipped["other name"] += 1
                continue
            try:
                info = path.stat()
            except OSError:  # a dangling link
                skipped["unreadable"] += 1
                continue
            if stat.S_ISREG(info.st_mode):  # opening a FIFO would wait forever
                found.append(Source(str(path), path.relative_to(root).as_posix(), kind, info.st_size, info.st_mtime_ns))
    # Splits cut the list of documents in order. In alphabetical order whole packages would land in one split.
    return sorted(found, key=lambda s: (hashlib.sha256(s.name.encode(errors="surrogateescape")).digest(), s.name))


def find(
    inputs: Sequence[str],
    *,
    glob: str | None = None,
    tokens: bool = False,
    max_files: int | None = None,
    max_bytes: int | None = None,
    output: str | None = None,
) -> tuple[list[Source], Counter]:
    """List the files of ``--input`` in a fixed order: inputs as given, each folder's files by a hash of their path.

    Args:
        inputs: files, folders (searched recursively; hidden ones, ``__pycache__``, ``site-packages`` and
            ``dist-packages`` are left out) or ``stdlib``, the running Python's own standard library.
        glob: take only the files of folders whose name matches, whatever their suffix.
        tokens: look for token files instead of text.
        max_files, max_bytes: stop before either is exceeded.
        output: prefix of the output, whose files are no input even where it lies in an input folder.

    Returns:
        The files, and how many files of folders were not taken, by reason.

    Raises:
        DataError: a path is missing, unreadable, given twice or of unknown kind, or nothing is left.
    """
    found: list[Source] = []
    skipped: Counter = Counter()
    own = None if output is None else os.path.abspath(output)
    for given in inputs:
        path = Path(given)
        if given == "stdlib" and not path.exists() and not tokens:
            # Only its Python files are meant: the summary does not count the others as left out.
            found += _walk(Path(sysconfig.get_paths()["stdlib"]), glob or "*.py", tokens, own, Counter())
        elif path.is_dir():
            here = _walk(path, glob, tokens, own, skipped)
            if not here:
                what = f"matching {glob!r}" if glob else f"ending in one of {accepted_suffixes(tokens)}"
                raise DataError(f"--input: folder {given} holds no file {what}")
            found += here
        elif path.is_file():
            kind = _kind(path.name, tokens)
            if kind is None:
                raise DataError(
                    f"--input: got {given}, accepted: a folder or a file ending in one of {accepted_suffixes(tokens)}"
                )
            if not os.access(path, os.R_OK):
                raise DataError(f"--input: no permission to read {given}")
            info = path.stat()
            found.append(Source(str(path), path.name, kind, info.st_size, info.st_mtime_ns))
        else:
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise DataError(f"--input: {given} {what}, accepted: files, folders or 'stdlib'")
    found = _distinct(found, skipped)
    total = 0
    for count, source in enumerate(found):
        total += source.size
        if (max_files is not None and count >= max_files) or (max_bytes is not None and total > max_bytes):
            found = found[:count]
            break
    if not found:
        raise DataError(f"--max-bytes: got {max_bytes}, accepted: at least the size of the first file")
    return found, skipped


def _distinct(found: list[Source], skipped: Counter) -> list[Source]:
    """Drop further links to a file that is there already; refuse a file that was really given twice."""
    kept: dict[str, Source] = {}
    for source in found:
        first = kept.setdefault(os.path.realpath(source.path), source)
        if first is source:
            continue
        if not (os.path.islink(source.path) or os.path.islink(first.path)):
            raise DataError(f"--input: {source.path} is given twice")
        skipped["duplicate link"] += 1
    return list(kept.values())


def cut_into_shards(files: Sequence[Source], shard_bytes: int, dtype: np.dtype | None = None) -> list[list[Piece]]:
    """Cut files into shards of about ``shard_bytes`` bytes of input.

    Args:
        files: from :func:`find`.
        shard_bytes: a shard is closed when it reaches this.
        dtype: type of headerless token files.

    Raises:
        DataError: a Parquet or token file cannot be opened, or its tokens have another width than they are read with.
    """
    shards: list[list[Piece]] = [[]]
    filled = 0
    for source in files:
        for piece in _pieces(source, shard_bytes, dtype):
            if filled >= shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(piece)
            filled += piece.size
    return shards


def _pieces(source: Source, shard_bytes: int, dtype: np.dtype | None) -> Iterator[Piece]:
    path, kind, size = source.path, source.kind, source.size
    if kind == "parquet":
        metadata = open_parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield Piece(path, kind, group, group + 1, size // metadata.num_row_groups)
        return
    if kind == "tokens":
        tokens = open_tokens(path, dtype)
        check_width(tokens, f"--input: {path}")
        length, item = len(tokens), tokens.itemsize
    else:
        length, item = size, 1
    # A gzip stream can only be read from its beginning, and a text file is one document or is split by its separator.
    step = length if kind in ("text", "gzip") else max(1, shard_bytes // item)
    for start in range(0, length, max(step, 1)):
        stop = min(start + step, length)
        yield Piece(path, kind, start, stop, (stop - start) * item)
    if length == 0 and kind == "text":
        yield Piece(path, kind, 0, 0, 0)  # so that it is counted as empty


def open_parquet(path: str) -> Any:
    """A ``pyarrow.parquet.ParquetFile``.

    Raises:
        DataError: not a Parquet file, or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pa.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"--input: {path} is not a readable Parquet file: {problem}") from None


def open_tokens(path: str, dtype: np.dtype | None, option: str | None = "--input") -> np.ndarray:
    """Map a token file: a NumPy array file, or bare numbers (Dolma ships those under the name .npy too).

    Args:
        dtype: of bare numbers; a NumPy file must be of it where it is given.
        option: of the command line that named the file, for the error; None: a description of token files did.

    Raises:
        DataError: not one-dimensional, not of an accepted type, or not a whole number of tokens.
    """
    key = "--dtype" if option else "dtype"
    with open(path, "rb") as file:
        numpy_file = file.read(6) == b"\x93NUMPY"
    try:
        if numpy_file:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32, np.int32):
                raise ValueError(
                    f"holds {tokens.dtype} of shape {tokens.shape}, accepted: one dimension of uint16, uint32 or int32"
                )
            if dtype is not None and tokens.dtype != dtype:
                raise ValueError(f"holds {tokens.dtype}, {key} says {dtype}")
            return tokens
        size = os.path.getsize(path)
        if dtype is None:
            raise ValueError(f"is a file of bare numbers: {key} uint16 or uint32 is needed")
        if size % dtype.itemsize:
            raise ValueError(f"has {size} bytes, not a multiple of {dtype.itemsize} ({key} {dtype})")
        return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    except ValueError as problem:
        raise DataError(f"{option + ': ' if option else ''}{path} {problem}") from None
