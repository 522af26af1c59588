"""Input of ``prepare_data.py``: finds files and cuts them into shards of work.

A *shard* is a list of pieces, a *piece* a file or a part of it: bytes of JSON lines, row groups of
Parquet. Bytes need not end where a line does: a line belongs to the piece in which it starts. Files
and shards depend on the input alone, never on the number of workers, so that results do not either.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.common.errors import DataError

_TEXT = """
    txt text md rst tex py pyi pyx ipynb c h cc cpp cxx hpp cu cuh m java kt scala js jsx ts tsx go
    rs rb php pl lua r jl swift cs hs ml sh bash sql html css xml yaml yml toml ini cfg cmake
"""
TEXT_SUFFIXES = frozenset(f".{ending}" for ending in _TEXT.split())
DATA_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "gzip",
    ".json.gz": "gzip",
    ".parquet": "parquet",
}
_LEAVE_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Source:
    """One input file. ``name`` identifies it independently of where the input folder lies."""

    path: str
    name: str
    kind: str  # text, jsonl, gzip, parquet
    size: int  # bytes
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes ``[start, stop)`` (jsonl), row groups ``[start, stop)`` (parquet),
    all (others).
    """

    path: str
    kind: str
    start: int
    stop: int
    size: int  # bytes of input, for the progress bar


def _kind(name: str) -> str | None:
    name = name.lower()
    for suffix, kind in DATA_SUFFIXES.items():
        if name.endswith(suffix):
            return kind
    return "text" if Path(name).suffix in TEXT_SUFFIXES else None


def _source(path: Path, name: str, kind: str) -> Source:
    info = path.stat()
    return Source(str(path), name, kind, info.st_size, info.st_mtime_ns)


def _walk(root: Path, glob: str | None, skipped: Counter) -> list[Source]:
    """Files of a folder that are read, in a fixed order."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _LEAVE_OUT]
        for file in files:
            path, kind = Path(folder, file), _kind(file)
            if glob is not None:
                kind = (kind or "text") if fnmatch.fnmatch(file, glob) else None
            if kind is None or file.startswith("."):
                skipped["other name"] += 1
            elif not path.is_file():  # a dangling link, or a FIFO, whose reader would hang
                skipped["unreadable"] += 1
            else:
                found.append(_source(path, path.relative_to(root).as_posix(), kind))
    # Splits cut the list of documents in order. In alphabetical order whole packages would land in
    # one split.
    return sorted(
        found,
        key=lambda s: (hashlib.sha256(s.name.encode(errors="surrogateescape")).digest(), s.name),
    )


def find(
    inputs: Sequence[str],
    *,
    glob: str | None = None,
    max_files: int | None = None,
    max_bytes: int | None = None,
) -> tuple[list[Source], Counter]:
    """List the files of ``--input`` in a fixed order: inputs as given, each folder's files by a
    hash of their path.

    Args:
        inputs: files, folders, searched recursively, or ``stdlib``, the running Python's own
            standard library.
        glob: take only the files of folders whose name matches, whatever their suffix.
        max_files, max_bytes: stop before either is exceeded.

    Returns:
        The files, each once, and how many files of folders were not taken, by reason.

    Raises:
        DataError: a path is missing or of unknown kind, or nothing is left.
    """
    suffixes = " ".join(sorted({*DATA_SUFFIXES, *TEXT_SUFFIXES}))
    found: list[Source] = []
    skipped: Counter = Counter()
    for given in inputs:
        path = Path(given)
        if given == "stdlib" and not path.exists():
            # The summary does not count its other files as left out.
            found += _walk(Path(sysconfig.get_paths()["stdlib"]), glob or "*.py", Counter())
        elif path.is_dir():
            found += _walk(path, glob, skipped)
        elif path.is_file() and (kind := _kind(path.name)) is not None:
            found.append(_source(path, path.name, kind))
        else:
            what = "" if path.exists() else ", which does not exist"
            raise DataError(
                f"--input: got {given}{what}, accepted: a folder or a file ending in one of "
                f"{suffixes}"
            )
    distinct: dict[str, Source] = {}
    for source in found:  # a document that is read twice would be trained on twice
        distinct.setdefault(os.path.realpath(source.path), source)
    skipped["duplicate"] += len(found) - len(distinct)
    taken = list(distinct.values())[:max_files]
    if max_bytes is not None:
        ends = itertools.accumulate(source.size for source in taken)
        taken = [source for source, end in zip(taken, ends, strict=True) if end <= max_bytes]
    if not taken:
        limits = f"--glob {glob}, --max-bytes {max_bytes}"
        raise DataError(
            f"--input: got {' '.join(inputs)} ({limits}), accepted: a file ending in one of "
            f"{suffixes}"
        )
    return taken, +skipped


def cut_into_shards(files: Sequence[Source], shard_bytes: int) -> list[list[Piece]]:
    """Cut files from :func:`find` into shards, which are closed at ``shard_bytes`` bytes of
    input.
    """
    shards: list[list[Piece]] = [[]]
    filled = 0
    for source in files:
        for piece in _pieces(source, shard_bytes):
            if filled >= shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(piece)
            filled += piece.size
    return shards


def _pieces(source: Source, shard_bytes: int) -> Iterator[Piece]:
    path, kind, size = source.path, source.kind, source.size
    if kind == "parquet":
        groups = open_parquet(path).metadata.num_row_groups
        yield from (Piece(path, kind, group, group + 1, size // groups) for group in range(groups))
    elif kind == "jsonl":
        for start in range(0, size, shard_bytes):
            stop = min(start + shard_bytes, size)
            yield Piece(path, kind, start, stop, stop - start)
    else:  # a separator may be anywhere; a gzip stream can only be read from its beginning
        yield Piece(path, kind, 0, sys.maxsize, size)


def open_parquet(path: str) -> Any:
    """A ``pyarrow.parquet.ParquetFile``; DataError where it is none, or damaged."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        return pa.parquet.ParquetFile(path)
    except pa.ArrowException as problem:
        raise DataError(
            f"{path}: got no readable Parquet file ({problem}), accepted: one"
        ) from None
