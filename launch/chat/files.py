"""Chat files: JSON lines, or one JSON array, read record by record with the place of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.prep import DataError

__all__ = ["find_files", "records"]

_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
"""First bytes of files that are no text: of those each line would be malformed."""


def find_files(given: list[str], option: str) -> list[Path]:
    """The files of a command line, each checked to be there; a folder means its ``*.jsonl`` and ``*.json``, sorted.

    Raises:
        DataError: no such file, an empty folder, or one file twice.
    """
    found: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".json"))
            if not inside:
                raise DataError(f"{option}: {name} is a folder without *.jsonl and *.json, accepted: chat files")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{option}: {name} does not exist, accepted: files of conversations (JSON lines)")
    if len({path.resolve() for path in found}) < len(found):
        raise DataError(f"{option}: got {' '.join(given)}, accepted: every file once")
    return found


def records(path: Path) -> Iterator[tuple[int, str | Any]]:
    """Line numbers from 1 and texts of a file; empty lines are left out.

    Of a file that is one JSON array (ToolBench's), the numbers and values of its items.

    Raises:
        DataError: a file that cannot be read, is no UTF-8, or an array that is not whole.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
            file.seek(0)
            if kind := next((name for magic, name in _PACKED.items() if head.startswith(magic)), None):
                raise DataError(f"{path}: is a {kind} file, accepted: JSON lines, or a JSON array, as text")
            if head.startswith(b"["):
                try:
                    yield from enumerate(json.loads(file.read().decode("utf-8-sig")), 1)
                except (ValueError, RecursionError) as problem:
                    raise DataError(f"{path}: not a whole JSON array ({problem}), accepted: JSON lines") from None
                return
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    yield number, None
                    continue
                if text:
                    yield number, text
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror or problem})") from problem
