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

from .durable import make_folder, named, sync_folder, sync_tree, walk, write_text
from .manifest import MANIFEST, UNFINISHED, CheckpointError, read_manifest, saved_at

__all__ = [
    "LATEST",
    "begin",
    "find",
    "finish",
    "finished",
    "name_latest",
    "name_of",
    "own_name",
    "publish",
    "published",
    "replaced_or",
    "retire",
    "unfinished",
]

LATEST = "latest"
_UNFINISHED = ".unfinished-"
_REPLACED = f"{_UNFINISHED}replaced-"
_NAME = re.compile(r"step(\d{8,})")
_LEFTOVER = re.compile(rf"{re.escape(_UNFINISHED)}(replaced-|removed-)?(.+)")
_OURS = re.compile(rf"{_NAME.pattern}|global_step\d+")
"""Names that only a program gives; under any other one a leftover is known by its manifest."""


def name_of(step: int) -> str:
    """What the checkpoint after ``step`` steps is called."""
    return f"step{step:08d}"


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written before it is published."""
    return final.parent / (_UNFINISHED + final.name)


def begin(final: Path) -> Path:
    """Make the folder in which a checkpoint is written before it is published; what killed saves left goes first.

    Its manifest says that it is not finished.

    Raises:
        OSError: it cannot be made.
    """
    make_folder(final.parent)
    temporary = unfinished(final)
    _clean(final.parent)
    _rmtree(temporary)
    temporary.mkdir()
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(UNFINISHED, file)
    return temporary


def publish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Turn a written folder, whose files are on disk, into the newest checkpoint.

    Raises:
        OSError: ``latest`` is what it was, and the checkpoint it names is there; a ``final`` from before is too.
    """
    finish(temporary, final, manifest)
    name_latest(final.parent, final.name)


def finish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Give a written folder, whose files are on disk, its manifest and its name.

    Raises:
        OSError: a ``final`` from before is what :func:`replaced_or` gives.
    """
    write_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    sync_tree(temporary)
    replaced = None
    if os.path.lexists(final):
        if (final / MANIFEST).is_file():  # the same step again, after a restart from an older checkpoint
            replaced = _replaced(final)
            _make_room(replaced, final)
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


def name_latest(folder: Path, tag: str) -> None:
    """Let ``latest`` name a published checkpoint.

    Raises:
        OSError: it is what it was.
    """
    write_text(folder / LATEST, tag)


def replaced_or(final: Path) -> Path:
    """Where the finished checkpoint of this name is: under another name after a kill while it was saved again."""
    replaced = _replaced(final)
    return replaced if not os.path.lexists(final) and (replaced / MANIFEST).is_file() else final


def own_name(checkpoint: Path) -> str:
    """What a checkpoint is called, also while it has the name that :func:`replaced_or` finds."""
    return checkpoint.name.removeprefix(_REPLACED)


def find(folder: str | Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one its ``latest`` names; None where it holds none.

    Without ``latest``, which a kill in the very first save leaves, it is the one that was saved last; saves with
    ``save_latest=False`` do not count.

    Returns:
        Its folder, without "..", links and the like: :func:`own_name` says what it is called.

    Raises:
        CheckpointError: ``latest`` names something that is not there, or the folder cannot be read.
    """
    folder = Path(folder)
    try:
        folder = replaced_or(folder.resolve())
        if (folder / MANIFEST).is_file():
            return folder
        if not folder.is_dir() or not os.path.lexists(folder / LATEST):
            saved = {checkpoint: said for checkpoint in published(folder) if (said := _saved(checkpoint)) is not None}
            return max(saved, key=saved.__getitem__, default=None)
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
        if (folder / name / MANIFEST).is_file():
            found = folder / name
            return found if found.name == name else found.resolve()
        if (found := replaced_or(folder / name)) != folder / name:  # killed while a step was saved for the second time
            return found
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


def published(folder: Path) -> list[Path]:
    """:func:`finished` ones, and those that a kill left under another name while they were saved again."""
    own = [folder / own_name(p) for p in folder.glob(f"{_REPLACED}*")] if folder.is_dir() else []
    return finished(folder) + [found for p in own if _NAME.fullmatch(p.name) and (found := replaced_or(p)) != p]


def _saved(checkpoint: Path) -> tuple[float, int] | None:
    """When, as its manifest says, and its step; None where ``latest`` was not to name it."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):  # damaged: what is loaded of it says so
        return 0, _step(checkpoint)
    return (saved_at(manifest), _step(checkpoint)) if manifest.get(LATEST, True) else None


def retire(
    folder: Path, newest: Path, keep: int = 0, superseded: Iterable[Path] = (), root: Path | None = None
) -> list[str]:
    """Remove what may go now that ``newest`` is published.

    That is: what killed saves left, ``superseded`` checkpoints, and finished ones that are more than ``keep``
    (0 = all stay). What ``latest`` names stays, whatever its step: that of ``folder`` and, where tags are as "a/b",
    that of ``root``. A checkpoint whose replacement did not come is put back.

    Checkpoints of later steps than ``newest`` were left when the run went back to an older one: those on the way to
    ``newest`` are kept first. Times of files do not count, a copied folder has lost them.

    Returns:
        What could not be done, and why; a later call tries again. That is no reason to stop a run.
    """
    try:
        problems = _clean(folder)
        order = sorted(finished(folder), key=lambda p: (_step(p) <= _step(newest), _step(p)))
        gone = [p for p in superseded if p.name != newest.name and p.exists()]
        # A save with save_latest=False does not take the place of what is named.
        stays = [at / name for at in {folder, root or folder} if (name := _latest(at)) is not None]
        for old in dict.fromkeys([*gone, *(order[:-keep] if keep else [])]):
            if not any(_holds(old, one) for one in stays):
                problems += _remove(old)
    except OSError as problem:
        return [str(problem)]
    return problems


def _latest(folder: Path) -> str | None:
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ValueError):  # ValueError: damaged, so it names nothing
        return None


def _holds(folder: Path, other: Path) -> bool:
    """Whether ``other`` is ``folder`` or lies in it, behind links too."""
    try:
        return other.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # one of them cannot be a name
        return False


def _clean(folder: Path) -> list[str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement did not come."""
    problems = []
    for leftover in list(folder.iterdir()):
        match = _LEFTOVER.fullmatch(leftover.name)
        if match is None or not (_OURS.fullmatch(match[2]) or (leftover / MANIFEST).is_file()):
            continue
        own = folder / match[2]
        replaced = match[1] == "replaced-" and _is_finished(leftover)
        try:
            if replaced and not own.exists():
                os.rename(leftover, own)
                continue
            if replaced and not leftover.is_symlink():
                _rescue(leftover, own)
        except OSError as problem:
            problems.append(str(named(problem, leftover)))
            continue
        problems += _remove(leftover, own) if replaced else _remove_tree(leftover)
    return problems


def _is_finished(leftover: Path) -> bool:
    try:
        return json.loads((leftover / MANIFEST).read_text(encoding="utf-8")) != UNFINISHED
    except ValueError:  # damaged since: not ours to remove
        return True
    except OSError:
        return False


def _rescue(replaced: Path, own: Path) -> None:
    """Move files that somebody put beside a checkpoint's own into the one that took its place.

    Where the manifest is damaged, those that are not named as a checkpoint's own.
    """
    try:
        listed = read_manifest(replaced, of_run=False)["files"]
    except CheckpointError:
        listed = {p.relative_to(replaced).as_posix() for p in replaced.rglob("*.pt")}
    for inner, names in list(walk(replaced)):
        links = [p.name for p in inner.iterdir() if p.is_symlink() and p.name not in names]  # to folders
        for name in (*names, *links):
            place = (inner / name).relative_to(replaced)
            if place.as_posix() not in listed and place != Path(MANIFEST) and not os.path.lexists(own / place):
                (own / place).parent.mkdir(parents=True, exist_ok=True)
                os.rename(inner / name, own / place)


def _make_room(replaced: Path, own: Path) -> None:
    """Remove what an earlier save left; what somebody put there and is in the new one's way stays under a free name."""
    if not replaced.is_symlink() and _is_finished(replaced):
        try:
            _rescue(replaced, own)
        except (FileExistsError, NotADirectoryError):
            os.rename(replaced, _free(own.with_name(own.name + ".kept")))
    _rmtree(replaced)


def _remove(old: Path, named_as: Path | None = None) -> list[str]:
    """Remove a checkpoint, out of sight first: a kill leaves none that only looks whole."""
    hidden = old.with_name(f"{_UNFINISHED}removed-{(named_as or old).name}")
    try:
        _rmtree(hidden)
        os.rename(old, hidden)
    except OSError as problem:
        return [str(named(problem, old))]
    return _remove_tree(hidden)


def _remove_tree(folder: Path) -> list[str]:
    """The manifest goes last: it says whose folder it is. Of a link the link goes, and what it leads to stays."""
    try:
        if folder.is_symlink():
            folder.unlink()
            return []
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner)
            elif inner.name != MANIFEST:
                inner.unlink()
        shutil.rmtree(folder)
    except OSError as problem:
        return [str(named(problem, folder))]
    return []


def _rmtree(folder: Path) -> None:
    """Remove a folder, or a link, if it is there."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _replaced(final: Path) -> Path:
    """Where a checkpoint is while another of its name takes its place."""
    return final.with_name(_REPLACED + final.name)


def _free(path: Path) -> Path:
    """``path``, or with a number behind it, so that nothing is there yet."""
    numbers = iter(range(2, 1_000_000))
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}{next(numbers)}")
    return free


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(own_name(checkpoint))
    return int(match[1]) if match else -1
