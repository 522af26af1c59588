"""What a finished checkpoint's folder says of itself: ``manifest.json``, and whether the files are those it lists."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["FORMAT", "MANIFEST", "CheckpointError", "checksums", "differences", "read_manifest", "verify"]

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names it and says why."""


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a finished checkpoint.

    Raises:
        CheckpointError: missing, unreadable, or of another format.
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
    return manifest


def verify(checkpoint: Path, files: Mapping[str, list[int]]) -> None:
    """Compare size and checksum of every file with the manifest; ranks share the work.

    Raises:
        CheckpointError: on every rank; lists the files that are missing or damaged.
    """
    found = checksums(checkpoint, sorted(files))
    wrong = []
    for name, (size, checksum) in files.items():
        if found[name] is None:
            wrong.append(f"{name}: missing")
        elif found[name] != [size, checksum]:
            wrong.append(f"{name}: damaged (is {found[name][0]} bytes, was {size})")
    if wrong:
        raise CheckpointError(f"{checkpoint} is damaged, load another one by its folder:\n" + "\n".join(wrong))


def checksums(folder: Path, names: list[str], sync: bool = False) -> dict[str, Any]:
    """[bytes, CRC-32] of each file, None for a missing one; files are dealt out to the ranks.

    ``sync``: also wait until they are on disk. Without torch.distributed, this process reads them all.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine: dict[str, Any] = {}
    for name in names[rank::world]:
        try:
            size = checksum = 0
            with (folder / name).open("rb") as file:
                if sync:
                    os.fsync(file.fileno())
                while block := file.read(1 << 24):
                    size, checksum = size + len(block), zlib.crc32(block, checksum)
            mine[name] = [size, checksum]
        except OSError:
            mine[name] = None
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    return {name: entry for part in everyone for name, entry in part.items()}


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
