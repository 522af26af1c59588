"""Documents of a piece of input: readers for text, JSON lines and Parquet."""

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

from launch.common.errors import DataError
from launch.data.input_files import Piece, open_parquet


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken out of files."""

    text_key: str = "text"  # JSON key or Parquet column that holds the text
    separator: str | None = None  # of documents in a text file; None = it is one document
    # Count lines and rows without usable text instead of stopping at the first.
    skip_bad: bool = False


def texts(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    """The documents that start in a piece of a text, JSON-lines or Parquet file; ``skipped`` counts
    what is left out.

    Raises:
        DataError: a line or row has no usable text (unless ``options.skip_bad``), or the file is
            damaged.
    """
    reader = {"text": _text, "jsonl": _lines, "gzip": _lines, "parquet": _rows}[piece.kind]
    try:
        for text in reader(piece, options, skipped):
            if text:
                yield text
            else:
                skipped["empty"] += 1
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"--input: cannot read {piece.path}: {problem}") from problem


def _text(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    data = Path(piece.path).read_bytes()
    if b"\0" in data:
        skipped["binary"] += 1
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
        return
    if options.separator:  # lines of files from Windows end with two characters
        yield from re.split(r"\r?\n".join(map(re.escape, options.separator.split("\n"))), text)
    else:
        yield text


def _bad(where: str, problem: str, options: ReadOptions, skipped: Counter) -> None:
    if not options.skip_bad:
        raise DataError(f"{where}: {problem}; --skip-bad leaves such lines and rows out")
    skipped["bad line"] += 1


def _usable(value: Any) -> bool:
    """Whether a value is text that can be written as UTF-8 (JSON may hold lone surrogates)."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _lines(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    opened: Any = open if piece.kind == "jsonl" else gzip.open
    with opened(piece.path, "rb") as file:
        if piece.start:  # the line under way belongs to the piece before
            file.seek(piece.start - 1)
            file.readline()
        while (start := file.tell()) < piece.stop and (line := file.readline()):
            if not line.strip():
                continue
            text = problem = None
            try:
                # Files from Windows begin with a mark.
                record = json.loads(line.decode("utf-8-sig"))
                text = record[options.text_key]
            except (ValueError, RecursionError) as error:
                problem = f"not JSON ({error})"
            except (KeyError, TypeError, IndexError):
                keys = (
                    ", ".join(map(repr, list(record)[:10]))
                    if isinstance(record, dict)
                    else "not an object"
                )
                problem = (
                    f"no key {options.text_key!r} ({keys}); accepted: one with text (--text-key)"
                )
            if problem is None and not _usable(text):
                problem = f"the value of {options.text_key!r} is not text"
            if problem is None:
                yield text  # type: ignore[misc]
            else:
                number = "" if options.skip_bad else f":{_line_number(file, start)}"
                _bad(f"{piece.path}{number}", problem, options, skipped)


def _line_number(file: Any, position: int) -> int:
    file.seek(0)
    return 1 + sum(
        file.read(min(1 << 20, position - at)).count(b"\n") for at in range(0, position, 1 << 20)
    )


def _rows(piece: Piece, options: ReadOptions, skipped: Counter) -> Iterator[str]:
    import pyarrow as pa

    file, key = open_parquet(piece.path), options.text_key
    if key not in (columns := file.schema_arrow.names):
        raise DataError(
            f"--text-key: got {key!r}, accepted: a column of {piece.path}: {', '.join(columns)}"
        )
    row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
    try:
        for batch in file.iter_batches(
            1024, row_groups=range(piece.start, piece.stop), columns=[key]
        ):
            for value in batch.column(0).to_pylist():
                row += 1
                if _usable(value):
                    yield value
                else:
                    _bad(
                        f"{piece.path}: row {row}",
                        f"{key!r} is {type(value).__name__}, not text",
                        options,
                        skipped,
                    )
    except pa.ArrowException as problem:
        raise DataError(f"--input: cannot read {piece.path}: {problem}") from None
