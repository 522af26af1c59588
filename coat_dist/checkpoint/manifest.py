"""``manifest.json`` of a finished checkpoint: what it lists, and whether the files are still those."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ranks import gather, on_rank_0, rank_and_world
from .durable import walk

__all__ = ["FORMAT", "MANIFEST", "CheckpointError", "differences", "read_manifest", "sync_files", "verify"]

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names it and says why."""


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a finished checkpoint.

    Raises:
        CheckpointError: missing, unreadable, of another format, or without what every finished checkpoint has in it.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.get('format') if isinstance(manifest, dict) else None!r}, accepted: {FORMAT}"
        )
    if wrong := [key for key, fits in _CONTENT.items() if not fits(manifest.get(key))]:
        raise CheckpointError(f"{path}: is damaged, {', '.join(wrong)} missing or of another kind than was written")
    return manifest


def _is_progress(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("step")) is int


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(numbers, list) and [type(n) for n in numbers] == [int, int] for numbers in value.values()
    )


_CONTENT = {"progress": _is_progress, "run": lambda value: isinstance(value, dict), "files": _is_files}


def verify(checkpoint: Path, files: Mapping[str, list[int]]) -> None:
    """Compare size and checksum of every file with the manifest; ranks share the work.

    Raises:
        CheckpointError: on every rank; lists the files that are missing, damaged or cannot be read.
    """
    found = _read_all(checkpoint, sorted(files), sync=False)
    wrong = []
    for name, (size, checksum) in files.items():
        now = found[name]
        if isinstance(now, str):
            wrong.append(f"{name}: {now}")
        elif now != [size, checksum]:
            wrong.append(f"{name}: damaged (is {now[0]} bytes, was {size})")
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged, load another one by its folder:\n" + "\n".join(wrong))


def sync_files(folder: Path) -> dict[str, list[int]]:
    """Wait until every file in ``folder`` and the folders in it is on disk; [bytes, CRC-32] by path in ``folder``.

    Rank 0 lists the files and deals them out to the ranks.

    Raises:
        CheckpointError: on every rank; lists the files that a rank could not read or bring to disk, and empty ones.
    """

    def listed() -> list[str]:
        return sorted((inner / name).relative_to(folder).as_posix() for inner, files in walk(folder) for name in files)

    try:
        names = on_rank_0(listed)
    except OSError as problem:
        raise CheckpointError(f"{folder}: cannot be listed ({problem})") from problem
    found = _read_all(folder, names, sync=True)
    wrong = [f"{folder / name}: {problem}" for name, problem in found.items() if isinstance(problem, str)]
    wrong += [f"{folder / name}: is empty" for name, numbers in found.items() if numbers[0] == 0]
    if wrong or not names:
        raise CheckpointError("cannot finish a checkpoint:\n" + "\n".join(wrong or [f"{folder}: holds no files"]))
    return found  # type: ignore[return-value]  # no text is left in it


def _read_all(folder: Path, names: list[str], sync: bool) -> dict[str, list[int] | str]:
    """[bytes, CRC-32] of each file, or what is wrong with it; files are dealt out to the ranks."""
    rank, world = rank_and_world()
    mine = {name: _read(folder / name, sync) for name in names[rank::world]}
    return {name: result for part in gather(mine) for name, result in part.items()}


def _read(path: Path, sync: bool) -> list[int] | str:
    size = checksum = 0
    try:
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            while block := file.read(1 << 24):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
    except FileNotFoundError:
        return "missing"
    except OSError as problem:
        return f"cannot be {'written' if sync else 'read'} ({problem})"
    return [size, checksum]


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """A line for every value in which two nested mappings differ, by dotted key."""
    old, new = _flat(saved), _flat(current)
    return {
        key: f"{key}: checkpoint has {old.get(key)!r}, this run has {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: list(value) if isinstance(value, tuple) else value}
    return {
        k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
