"""A folder of checkpoints: which are finished, which is the newest, how a new one is added, which may be removed.

Nothing here knows what a checkpoint holds besides its ``manifest.json``. At every moment, and after an error or a kill
at any line, the folder holds a finished checkpoint that :func:`find` finds, once it held one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .durable import named, sync_folder, sync_tree, write_text
from .manifest import MANIFEST, CheckpointError

__all__ = ["LATEST", "find", "finished", "name_of", "publish", "retire", "unfinished"]

LATEST = "latest"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step(\d{8,})")
_LEFTOVER = re.compile(rf"{re.escape(_UNFINISHED)}(replaced-|removed-)?({_NAME.pattern})")


def name_of(step: int) -> str:
    """What the checkpoint after ``step`` steps is called."""
    return f"step{step:08d}"


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written before it is published."""
    return final.parent / (_UNFINISHED + final.name)


def publish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Turn a written folder, whose files are on disk, into the newest checkpoint.

    Raises:
        OSError: ``latest`` is what it was, and the checkpoint it names is there; a ``final`` from before is too.
    """
    write_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    sync_tree(temporary)
    replaced = None
    if final.exists():
        if (final / MANIFEST).is_file():  # the same step again, after a restart from an older checkpoint
            replaced = _replaced(final)
            if replaced.exists():
                shutil.rmtree(replaced)
        else:  # nothing of ours: it stays, under another name
            replaced = _free(final.with_name(final.name + ".kept"))
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced is not None:
            with suppress(OSError):  # find() and retire() know the other name
                os.rename(replaced, final)
        raise
    sync_folder(final.parent)
    write_text(final.parent / LATEST, final.name)


def find(folder: str | Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one its ``latest`` names; None where it holds none.

    Without ``latest``, which a kill in the very first save leaves, it is the one of the highest step.

    Returns:
        Its folder, without "..", links and the like: its last part is its name.

    Raises:
        CheckpointError: ``latest`` names something that is not there, or the folder cannot be read.
    """
    folder = Path(folder)
    try:
        folder = folder.resolve()
        if (folder / MANIFEST).is_file():
            return folder
        try:
            name = (folder / LATEST).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return max(finished(folder), key=_step, default=None)
        if (folder / name / MANIFEST).is_file():
            found = folder / name
            return found if found.name == name else found.resolve()
        if (_replaced(folder / name) / MANIFEST).is_file():  # killed while a step was saved for the second time
            return _replaced(folder / name)
        others = ", ".join(p.name for p in finished(folder)) or "none"
    except (OSError, RuntimeError, ValueError) as problem:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: cannot be read ({problem})") from problem
    raise CheckpointError(f"{folder / LATEST}: names {name!r}, which is no checkpoint; there are: {others}")


def finished(folder: Path) -> list[Path]:
    """Finished checkpoints by step. A copy under a name of one's own is not among them, and so never removed."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=_step)


def retire(folder: Path, newest: Path, keep: int = 0, superseded: Iterable[Path] = ()) -> list[str]:
    """Remove what may go now that ``newest`` is published.

    That is: what killed saves left, ``superseded`` checkpoints, and finished ones that are more than ``keep``
    (0 = all stay). A checkpoint whose replacement did not come is put back.

    Checkpoints of later steps than ``newest`` were left when the run went back to an older one: those on the way to
    ``newest`` are kept first. Times of files do not count, a copied folder has lost them.

    Returns:
        What could not be done, and why; a later call tries again. That is no reason to stop a run.
    """
    try:
        problems = _clean(folder)
        order = sorted(finished(folder), key=lambda p: (_step(p) <= _step(newest), _step(p)))
        gone = [p for p in superseded if p.name != newest.name and p.exists()]
        for old in dict.fromkeys([*gone, *(order[:-keep] if keep else [])]):
            problems += _remove(old)
    except OSError as problem:
        return [str(problem)]
    return problems


def _clean(folder: Path) -> list[str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement did not come."""
    problems = []
    for leftover in list(folder.iterdir()):
        match = _LEFTOVER.fullmatch(leftover.name)
        if match is None:
            continue
        own = folder / match[2]
        if match[1] == "replaced-" and not own.exists() and (leftover / MANIFEST).is_file():
            try:
                os.rename(leftover, own)
            except OSError as problem:
                problems.append(str(named(problem, leftover)))
        else:
            problems += _remove_tree(leftover)
    return problems


def _remove(old: Path) -> list[str]:
    """Remove a checkpoint, out of sight first: a kill leaves none that only looks whole."""
    hidden = old.with_name(f"{_UNFINISHED}removed-{old.name}")
    try:
        os.rename(old, hidden)
    except OSError as problem:
        return [str(named(problem, old))]
    return _remove_tree(hidden)


def _remove_tree(folder: Path) -> list[str]:
    try:
        shutil.rmtree(folder)
    except OSError as problem:
        return [str(named(problem, folder))]
    return []


def _replaced(final: Path) -> Path:
    """Where a checkpoint is while another of its name takes its place."""
    return final.parent / f"{_UNFINISHED}replaced-{final.name}"


def _free(path: Path) -> Path:
    """``path``, or with a number behind it, so that nothing is there yet."""
    numbers = iter(range(2, 1_000_000))
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}{next(numbers)}")
    return free


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1
