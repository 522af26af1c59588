"""A folder of checkpoints: which are finished, which is the newest, how a new one is added, which
may be removed.

At every moment, and after an error or a kill at any line, the folder holds a finished checkpoint
that :func:`find` finds, once it held one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..manifest import MANIFEST, UNFINISHED, CheckpointError, readable
from .durable import make_folder, named, sync_folder, sync_tree, write_text

LATEST = "latest"
HIDDEN = ".unfinished-"
"""First characters of the names of folders that are being written, replaced or removed."""
_REPLACED, _REMOVED = f"{HIDDEN}replaced-", f"{HIDDEN}removed-"
_NAME = re.compile(r"step(\d{8,})")


def name_of(step: int) -> str:
    """What the checkpoint after ``step`` steps is called."""
    return f"step{step:08d}"


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written before it is published."""
    return final.with_name(HIDDEN + final.name)


def begin(final: Path) -> None:
    """Make the folder in which a checkpoint is written, marked as unfinished, and those it lies in;
    remove what killed saves left.
    """
    make_folder(final.parent)
    temporary, script = unfinished(final), final.with_name("zero_to_fp32.py")
    if script.is_symlink():  # DeepSpeed would copy its script to wherever it points
        script.unlink()
    _clean(final.parent)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    # A later save knows it by this.
    with (temporary / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(UNFINISHED, file)


def finish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Give a written folder, whose files are on disk, its manifest and its name.

    Raises:
        OSError: :func:`replaced_or` still gives the earlier checkpoint of this name.
    """
    write_text(temporary / MANIFEST, json.dumps(manifest, indent=1))
    sync_tree(temporary)
    replaced = None
    if os.path.lexists(final):
        if (final / MANIFEST).is_file() and not final.is_symlink():  # the same tag again
            replaced = final.with_name(_REPLACED + final.name)
            _settle(replaced, final)
        else:  # nothing of ours: it stays, under another name
            replaced = _kept(final)
    put_in_place(temporary, final, replaced)


def put_in_place(temporary: Path, final: Path, replaced: Path | None) -> None:
    """Rename ``final`` to ``replaced``, unless it is None, and a written folder to ``final``; an
    error undoes both.
    """
    if replaced is not None:
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except BaseException:
        if replaced is not None:
            with suppress(OSError):  # find() and retire() know the other name
                os.rename(replaced, final)
        raise
    sync_folder(final.parent)


def replaced_or(final: Path) -> Path:
    """Where the finished checkpoint of this name is: under another name after a kill while it
    was saved again.
    """
    replaced = final.with_name(_REPLACED + final.name)
    return replaced if not os.path.lexists(final) and (replaced / MANIFEST).is_file() else final


def own_name(checkpoint: Path) -> str:
    """What a checkpoint is called, also while it has the name that :func:`replaced_or` finds."""
    return checkpoint.name.removeprefix(_REPLACED)


def latest_of(folder: Path, name: str = LATEST) -> str | None:
    """What ``latest`` names; None where there is none."""
    path = folder / name
    return path.read_text(encoding="utf-8").strip() if os.path.lexists(path) else None


def find(folder: str | Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one its ``latest`` names; None where it
    holds none.

    Without ``latest``, which a kill in the very first save leaves, it is the one that was saved
    last. The folder may have another name than the checkpoint's :func:`own_name`.

    Raises:
        CheckpointError: ``latest`` names something that is not there, or the folder cannot be read.
    """
    folder = Path(folder)
    try:
        folder = replaced_or(folder.resolve())
        if (folder / MANIFEST).is_file():
            return folder
        if (name := latest_of(folder)) is None:
            return last_saved(published(folder))
        found = replaced_or(folder / name)
        if (found / MANIFEST).is_file():
            return found
        others = ", ".join(p.name for p in finished(folder)) or "none"
    except (OSError, RuntimeError, ValueError) as problem:  # RuntimeError: a loop of links
        raise CheckpointError(f"{folder}: cannot be read ({problem})") from problem
    raise CheckpointError(
        f"{folder / LATEST}: names {name!r}, which is no checkpoint; there are: {others}"
    )


def last_saved(checkpoints: Iterable[Path], universal: bool = True) -> Path | None:
    """The checkpoint that was saved last, by manifests. Saves with ``save_latest=False`` do not
    count.

    A damaged manifest counts as the oldest: loading that checkpoint reports the damage.
    """
    found = {}
    for checkpoint in checkpoints:
        manifest = readable(checkpoint)
        if manifest.get(LATEST, True) and (universal or not manifest.get("universal")):
            found[checkpoint] = manifest.get("saved", 0), own_name(checkpoint)
    return max(found, key=found.__getitem__, default=None)


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints by name, also those that a kill left under another name while they
    were saved again.
    """
    there = sorted(folder.iterdir()) if folder.is_dir() else []
    return [p for p in there if os.path.isfile(p / MANIFEST) and not own_name(p).startswith(HIDDEN)]


def finished(folder: Path) -> list[Path]:
    """Finished checkpoints by step. A copy under a name of one's own is not among them, and so
    never removed.
    """
    return sorted((p for p in checkpoints(folder) if _NAME.fullmatch(p.name)), key=_step)


def published(folder: Path) -> list[Path]:
    """:func:`finished` ones, and those that a kill left under another name while they were saved
    again.
    """
    found = [p for p in checkpoints(folder) if _NAME.fullmatch(own_name(p))]
    return [p for p in found if p == replaced_or(p.with_name(own_name(p)))]


def retire(folder: Path, newest: Path, keep: int = 0, superseded: Iterable[Path] = ()) -> list[str]:
    """Remove what killed saves left, ``superseded`` checkpoints, and finished ones beyond ``keep``
    (0 = all stay).

    What ``latest`` names stays. Checkpoints of later steps than ``newest`` were left when the run
    went back to an older one: those on the way to ``newest`` are kept first. Times of files do not
    count, a copied folder has lost them.

    Returns:
        What could not be done, and why; a later call tries again.
    """
    try:
        problems = _clean(folder)
        order = sorted(finished(folder), key=lambda p: (_step(p) <= _step(newest), _step(p)))
        gone = [p for p in superseded if p.name != newest.name and p.exists()]
        stays = latest_of(folder)  # a save with save_latest=False does not change it
    except (OSError, ValueError) as problem:
        return [str(problem)]
    for old in dict.fromkeys([*gone, *(order[:-keep] if keep else [])]):
        if old.name != stays:
            problems += _try(_remove, old)
    return problems


def _clean(folder: Path) -> list[str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement did not come."""
    problems = []
    for leftover in [p for p in folder.iterdir() if p.name.startswith(HIDDEN) and p.is_dir()]:
        if leftover.name.startswith(_REPLACED):
            problems += _try(_settle, leftover, folder / own_name(leftover))
        elif leftover.name.startswith(_REMOVED):
            problems += _try(shutil.rmtree, leftover)
        # Else another program may write it now.
        elif (leftover / MANIFEST).is_file() or not any(leftover.iterdir()):
            problems += _try(_remove, leftover)
    return problems


def _settle(replaced: Path, own: Path) -> None:
    """Put a replaced checkpoint back, or remove it where its replacement came. Nothing where
    there is none.
    """
    if replaced.is_symlink():  # none of ours, and files of another folder
        replaced.unlink()
    if not replaced.exists():
        return
    if not (replaced / MANIFEST).is_file():
        shutil.rmtree(replaced)
    elif not own.exists():
        os.rename(replaced, own)
    else:
        try:
            _rescue(replaced, own)
        # Damaged manifest; a file is in the way.
        except (ValueError, LookupError, FileExistsError, NotADirectoryError):
            os.rename(replaced, _kept(own))
        else:
            _remove(replaced)


def _rescue(replaced: Path, own: Path) -> None:
    """Move files that somebody put beside a checkpoint's own into the one that took its place."""
    listed = {*json.loads((replaced / MANIFEST).read_text(encoding="utf-8"))["files"], MANIFEST}
    for path in sorted(replaced.rglob("*")):
        name = path.relative_to(replaced)
        target = own / name
        if (
            name.as_posix() not in listed
            and (path.is_symlink() or not path.is_dir())
            and not os.path.lexists(target)
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)


def _remove(old: Path) -> None:
    """Remove a checkpoint or a link to one, under another name first: a kill leaves none that
    only looks whole.
    """
    if old.is_symlink():
        old.unlink()
        return
    hidden = old.with_name(_REMOVED + own_name(old).removeprefix(HIDDEN))
    if hidden.exists():
        shutil.rmtree(hidden)
    os.rename(old, hidden)
    shutil.rmtree(hidden)


def _try(work: Callable[..., Any], folder: Path, *args: Any) -> list[str]:
    try:
        work(folder, *args)
    except OSError as problem:
        return [str(named(problem, folder))]
    return []


def _kept(path: Path) -> Path:
    """A free name for what somebody else put at ``path``."""
    names = (path.with_name(f"{path.name}.kept{number}") for number in ("", *range(2, 1_000_000)))
    return next(name for name in names if not os.path.lexists(name))


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1
