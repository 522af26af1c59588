"""``manifest.json`` of a finished checkpoint: size and checksum of each file, and what the
engine was.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..ranks import gather
from .team import CheckpointError, Team, everyone
from .write.durable import walk

__all__ = [
    "FORMAT",
    "MANIFEST",
    "UNFINISHED",
    "CheckpointError",
    "differences",
    "read_manifest",
    "readable",
    "sync_files",
    "verify",
]

FORMAT = 1
MANIFEST = "manifest.json"
UNFINISHED = {"format": FORMAT, "unfinished": True}
"""The manifest of a folder that is being written."""


def read_manifest(checkpoint: Path, of_run: bool = True) -> dict[str, Any]:
    """The manifest of a finished checkpoint.

    Args:
        checkpoint: its folder.
        of_run: it was saved by ``launch/pretrain.py``, whose manifests say what the run was and how
            far it had come.

    Raises:
        CheckpointError: missing, unreadable, of another format, or without what every finished
            checkpoint has in it.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format: got another one, accepted: {FORMAT}")
    if manifest.get("unfinished"):
        raise CheckpointError(
            f"{checkpoint}: was never finished, accepted: a checkpoint whose saving had ended"
        )
    missing = [
        key for key in ("progress", "run", "files") if not isinstance(manifest.get(key), dict)
    ]
    if of_run and missing == ["progress", "run"]:
        raise CheckpointError(
            f"{checkpoint}: says of no run what it was, accepted: a checkpoint of "
            "launch/pretrain.py"
        )
    if missing := missing if of_run else [key for key in missing if key == "files"]:
        raise CheckpointError(
            f"{path}: is damaged, {', '.join(missing)} missing or of another kind than was written"
        )
    return manifest


def readable(checkpoint: Path) -> dict[str, Any]:
    """What a manifest says, unchecked; empty where it is missing or damaged, which loading
    reports.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def verify(
    checkpoint: Path,
    files: Mapping[str, list[int]],
    team: Team | None = None,
    checksums: bool = True,
) -> None:
    """Compare size and checksum of every file with the manifest; ranks share the work.

    Args:
        checkpoint: its folder.
        files: of the manifest.
        team: the ranks that have this folder before them; None = all.
        checksums: false compares sizes only and reads no file.

    Raises:
        CheckpointError: on every rank; lists files that are missing, damaged or of another
            checkpoint.
    """
    team = team or everyone()
    # Dealt out in turns, every rank gets as much.
    by_size = sorted(files, key=lambda name: (-files[name][0], name))
    found = _gather(
        team, {name: _read(checkpoint / name, checksums) for name in team.share(by_size)}
    )
    wrong = []
    for name, (size, checksum) in files.items():
        now = found[name]
        if isinstance(now, str):
            wrong.append(f"{checkpoint / name}: {now}")
        elif now != [size, checksum][: len(now)]:
            why = (
                f"is {now[0]} bytes, was {size}"
                if now[0] != size
                else "its checksum is not that of the manifest"
            )
            wrong.append(f"{checkpoint / name}: damaged ({why})")
    # DeepSpeed would take them all.
    there = team.ask_leader(lambda: [p.name for p in checkpoint.glob("*_states.pt")])
    wrong += [
        f"{checkpoint / name}: is of another checkpoint"
        for name in sorted(set(there) - files.keys())
    ]
    team.refuse(wrong, f"{checkpoint} is damaged, load another one:")


def sync_files(
    folder: Path, own: Iterable[Path] = (), team: Team | None = None
) -> dict[str, list[int]]:
    """Wait until every file in ``folder`` and the folders in it is on disk; [bytes, CRC-32] by path
    in ``folder``.

    Args:
        folder: a manifest in it is left out.
        own: files that this rank wrote and therefore reads, from its host's memory; the team shares
            the others.
        team: the ranks that have this folder before them; None = all.

    Raises:
        CheckpointError: on every rank; lists the files that a rank could not read or bring to disk,
            and empty ones.
    """
    team = team or everyone()

    def listed() -> list[str]:
        paths = sorted(inner / name for inner, files in walk(folder) for name in files)
        return [p.relative_to(folder).as_posix() for p in paths if p != folder / MANIFEST]

    names, mine = team.ask_leader(listed), {os.path.relpath(path, folder) for path in own}
    written = {name for part in team.members(gather(mine)) for name in part}
    mine |= set(team.share([name for name in names if name not in written]))
    found = _gather(team, {name: _read(folder / name, sync=True) for name in sorted(mine)})
    found |= {name: "is missing" for name in written - set(names)}
    wrong = [
        f"{folder / name}: {problem}"
        for name, problem in sorted(found.items())
        if isinstance(problem, str)
    ]
    wrong += [
        f"{folder / name}: is empty" for name, numbers in sorted(found.items()) if numbers[0] == 0
    ]
    team.refuse(wrong if found else [f"{folder}: holds no files"], "cannot finish a checkpoint:")
    return dict(sorted(found.items()))  # type: ignore[arg-type]  # no text is left in it


def _gather(team: Team, mine: dict[str, list[int] | str]) -> dict[str, list[int] | str]:
    return {name: result for part in team.members(gather(mine)) for name, result in part.items()}


def _read(path: Path, checksums: bool = True, sync: bool = False) -> list[int] | str:
    """[bytes, CRC-32] of a file, without ``checksums`` [bytes]; or what is wrong with it."""
    size = checksum = 0
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
            if not checksums:
                return [os.fstat(file.fileno()).st_size]
            synced = beside.submit(os.fsync, file.fileno()) if sync else None
            while block := file.read(1 << 24):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
            if synced is not None:
                synced.result()
    except FileNotFoundError:
        return "missing"
    except OSError as problem:
        return f"cannot be {'written' if sync else 'read'} ({problem})"
    return [size, checksum]


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """A line for every value in which two nested mappings differ, by dotted key."""
    old, new = _flat(saved), _flat(current)

    def said(value: Any) -> str:
        return "nothing" if value is None else repr(value)

    return {
        key: f"{key}: checkpoint has {said(old.get(key))}, this run has {said(new.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: list(value) if isinstance(value, tuple) else value}
    return {
        k: v
        for key, inner in value.items()
        for k, v in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
