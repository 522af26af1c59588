"""Documents of a piece of input: readers for text, JSON lines, Parquet and token files."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.prep import DataError
from launch.prep.sources import Piece, open_parquet, open_tokens

__all__ = ["ReadOptions", "texts", "token_documents"]

LONGEST_DOCUMENT = 1 << 28
"""Tokens. A token file without an end-of-document id for longer than this was given the wrong id."""
_SCAN = 1 << 22  # tokens looked at in one go when searching for the end of a document


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken out of files."""

    text_key: str = "text"
    """JSON key or Parquet column that holds the text."""
    separator: str | None = None
    """What separates documents inside a text file, lines of which end with \\n or \\r\\n; None = it is one document."""
    skip_bad: bool = False
    """Count lines and rows without usable text instead of stopping at the first."""


def texts(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    """The documents that start in a piece of a text, JSON-lines or Parquet file; ``skipped`` counts what is left out.

    Raises:
        DataError: a line or row has no usable text (unless ``options.skip_bad``), or the file is damaged.
    """
    reader = {"text": _text, "jsonl": _lines, "gzip": _gzip_lines, "parquet": _rows}[piece.kind]
    try:
        for text in reader(piece, options, skipped):
            if text:
                yield text
            else:
                skipped["empty"] += 1
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"--input: cannot read {piece.path}: {problem}") from problem


def _text(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    try:
        data = Path(piece.path).read_bytes()
    except PermissionError:
        skipped["unreadable"] += 1
        return
    if b"\0" in data:
        skipped["binary"] += 1
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
        return
    yield from [text] if options.separator is None else re.split(_separator(options.separator), text)


def _separator(given: str) -> str:
    """What a separator is in a file, as a regular expression: lines of Windows' files end with two characters."""
    return r"\r?\n".join(map(re.escape, given.split("\n")))


def _usable(value: Any) -> bool:
    """Whether a value is text that can be written as UTF-8 (JSON may hold lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(line: bytes, key: str) -> str:
    """The text of one JSON line; ValueError says why there is none."""
    try:
        record = json.loads(line.decode("utf-8-sig"))  # of a file from Windows, whose first line begins with a mark
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"not JSON ({problem})") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if key not in record:
        raise ValueError(f"no key {key!r}, it has {', '.join(map(repr, list(record)[:10])) or 'none'} (--text-key)")
    if not _usable(record[key]):
        raise ValueError(f"the value of {key!r} is not text")
    return record[key]


def _lines(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    with open(piece.path, "rb") as file:
        position = piece.start
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1  # the line under way belongs to the piece before
        while position < piece.stop:
            line = file.readline()
            if not line:
                break
            start, position = position, position + len(line)
            if line.strip():
                try:
                    yield _parse(line, options.text_key)
                except ValueError as problem:
                    if not options.skip_bad:
                        raise DataError(
                            f"{piece.path}:{_line_number(piece.path, start)}: {problem}; "
                            "--skip-bad leaves such lines out"
                        ) from None
                    skipped["bad line"] += 1


def _line_number(path: str, position: int) -> int:
    with open(path, "rb") as file:
        return 1 + sum(file.read(min(1 << 20, position - at)).count(b"\n") for at in range(0, position, 1 << 20))


def _gzip_lines(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    with gzip.open(piece.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _parse(line, options.text_key)
                except ValueError as problem:
                    if not options.skip_bad:
                        raise DataError(f"{piece.path}:{number}: {problem}; --skip-bad leaves such lines out") from None
                    skipped["bad line"] += 1


def _rows(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    import pyarrow as pa

    file = open_parquet(piece.path)
    if options.text_key not in file.schema_arrow.names:
        raise DataError(
            f"--text-key: got {options.text_key!r}, accepted: a column of {piece.path}, "
            f"which has {', '.join(file.schema_arrow.names)}"
        )
    row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
    try:
        for batch in file.iter_batches(1024, row_groups=range(piece.start, piece.stop), columns=[options.text_key]):
            for value in batch.column(0).to_pylist():
                row += 1
                if _usable(value):
                    yield value
                elif options.skip_bad:
                    skipped["bad line"] += 1
                else:
                    raise DataError(
                        f"{piece.path}: row {row}: {options.text_key!r} is {type(value).__name__}, not text; "
                        "--skip-bad leaves such rows out"
                    )
    except (pa.ArrowException, OSError) as problem:
        raise DataError(f"--input: {piece.path} is damaged: {problem}") from None


def _after_eod(tokens: np.ndarray, begin: int, eod: int, path: str) -> int:
    """Index just after the first ``eod`` at or after ``begin``; the length where there is none."""
    for at in range(begin, len(tokens), _SCAN):
        hits = np.flatnonzero(tokens[at : at + _SCAN] == eod)
        if hits.size:
            return at + int(hits[0]) + 1
        if at + _SCAN - begin > LONGEST_DOCUMENT:
            raise DataError(
                f"--eod: got {eod}, which {path} does not hold in the {LONGEST_DOCUMENT} tokens from {begin}, "
                "accepted: the id that ends documents there"
            )
    return len(tokens)


def token_documents(piece: Piece, dtype: np.dtype | None, eod: int, counts: Counter) -> Iterator[np.ndarray]:
    """The documents that start in a piece of a token file, each with the ``eod`` that ends it: views ``[length]``.
    ``counts`` gets "no eod" for a file without any.

    Raises:
        DataError: ``eod`` does not occur in a very long stretch of the file.
    """
    tokens = open_tokens(piece.path, dtype)
    start = 0 if piece.start == 0 else _after_eod(tokens, piece.start - 1, eod, piece.path)
    if start >= piece.stop:
        return
    for end in (start + 1 + np.flatnonzero(tokens[start : piece.stop] == eod)).tolist():
        yield tokens[start:end]
        start = end
    if start < piece.stop:
        end = _after_eod(tokens, piece.stop, eod, piece.path)
        if start == 0 and tokens[end - 1] != eod:
            counts["no eod"] += 1
        yield tokens[start:end]
