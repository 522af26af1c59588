"""Tags: which names a checkpoint may have, and which checkpoint ``engine.load_checkpoint`` means."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ..nodes import say_host
from ..ranks import attempt, rank_and_world
from .manifest import MANIFEST, CheckpointError, read_manifest, saved_at
from .publish import LATEST, own_name, replaced_or, unfinished
from .team import Team

__all__ = ["agree", "check_place", "check_tag", "find_tag", "is_checkpoint"]

_LATEST_UNIVERSAL = "latest_universal"
_UNFINISHED = unfinished(Path("x/")).name[:-1]
_BESIDE = (LATEST, f".{LATEST}.new", _LATEST_UNIVERSAL, MANIFEST, ".lock", "zero_to_fp32.py")
"""Files that a folder of checkpoints holds, or holds for a moment."""
_DEEP = 4
"""Folders in which a checkpoint is looked for where its tag is not known, so that no whole disk is read."""


def check_tag(tag: str) -> None:
    """Whether a checkpoint can have this name.

    Raises:
        CheckpointError: it would not be found again, or lie elsewhere.
    """
    parts = tag.split("/")
    wrong = [
        part
        for part in parts
        if part in ("", ".", "..") or part != part.strip() or not part.isprintable() or part.startswith(_UNFINISHED)
    ]
    if wrong or not set(parts).isdisjoint(_BESIDE):
        raise CheckpointError(
            f"tag: got {tag!r}, accepted: the name of a folder, or of one in another as in 'a/b', without spaces "
            f"around it, no part of which is one of {', '.join(_BESIDE)} or begins with {_UNFINISHED!r}"
        )


def check_place(save_dir: Path, tag: str) -> None:
    """Whether a checkpoint of this tag would lie too deep to be found without it, or in another one, or another one in
    it: one goes with the other.

    Raises:
        CheckpointError: names the tag, and the other one.
    """
    if len(PurePosixPath(tag).parts) > _DEEP:
        raise CheckpointError(f"tag: got {tag!r}, accepted: one of {_DEEP} parts or fewer")
    for outer in PurePosixPath(tag).parents[:-1]:
        if (replaced_or(save_dir / outer) / MANIFEST).is_file():
            raise CheckpointError(f"tag: got {tag!r}, which lies in the checkpoint '{outer}', accepted: one beside it")
    if not (save_dir / tag / MANIFEST).is_file() and (inner := next(_folders(save_dir, tag), None)) is not None:
        raise CheckpointError(f"tag: got {tag!r}, in which the checkpoint {inner[0]!r} lies, accepted: one beside that")


def agree(what: Mapping[str, Any], team: Team) -> None:
    """Refuse arguments that differ between ranks that share a folder; collective.

    Raises:
        CheckpointError: on every rank; names the argument and which rank gave what.
    """
    by_rank, _ = attempt(lambda: dict(what))
    wrong = []
    for key in what:
        given: dict[Any, list[int]] = {}
        for rank, one in enumerate(by_rank):
            given.setdefault(one[key], []).append(rank)  # type: ignore[index]
        nodes = key == "folder" and not team.whole  # each node may have its own
        if len(given) > 1 and not nodes:
            lines = "; ".join(f"{value!r} on rank(s) {_numbers(ranks)}" for value, ranks in given.items())
            wrong.append(f"{key}: got {lines}, accepted: the same on all ranks")
    if wrong:
        raise CheckpointError("\n".join(wrong))


def _numbers(ranks: list[int]) -> str:
    return ", ".join(f"{rank}{say_host(rank)}" for rank in ranks)


def find_tag(load_dir: Path, tag: str | None, universal: bool, team: Team) -> str | None:
    """The checkpoint that is meant, as a path in ``load_dir``; collective.

    Args:
        load_dir: holds checkpoints.
        tag: of one of them; None = the one that ``latest`` names (``latest_universal`` of universal ones), or, where a
            kill in the first save left no ``latest``, the one that was saved last.
        universal: ``checkpoint.load_universal`` is set.
        team: the ranks that have this folder before them.

    Returns:
        None where there is no checkpoint; DeepSpeed then says so.

    Raises:
        CheckpointError: on every rank; ``latest`` or ``tag`` names what is no finished checkpoint.
    """
    agree({"tag": tag, "folder": os.path.abspath(load_dir)}, team)
    found = team.ask_leader(lambda: _find(load_dir, tag, universal), CheckpointError)
    agree({LATEST: None if found is None else str(Path(found).with_name(own_name(Path(found))))}, team)
    return found


def _find(load_dir: Path, tag: str | None, universal: bool) -> str | None:
    if tag is not None:
        if not tag or not {".", ".."}.isdisjoint(tag.split("/")):
            raise CheckpointError(
                f"tag: got {tag!r}, accepted: None for the one that was saved last, or {_there(load_dir)}"
            )
        if any(part.startswith(_UNFINISHED) for part in PurePosixPath(tag).parts):
            raise CheckpointError(f"tag: got {tag!r}, a save that was never finished, accepted: {_there(load_dir)}")
        if not (load_dir / tag).is_dir() and replaced_or(load_dir / tag) == load_dir / tag:
            _check_holds_checkpoints(load_dir)
            raise CheckpointError(f"tag: got {tag!r}, which is not in {load_dir}, accepted: {_there(load_dir)}")
        if not is_checkpoint(replaced_or(load_dir / tag)) and (inner := [name for name, _ in _folders(load_dir, tag)]):
            raise CheckpointError(
                f"tag: got {tag!r}, a folder that holds checkpoints, accepted: {', '.join(map(repr, sorted(inner)))}"
            )
        return _path_in(load_dir, tag)
    latest = load_dir / (_LATEST_UNIVERSAL if universal else LATEST)
    if not os.path.lexists(latest):
        _check_holds_checkpoints(load_dir)
        if universal:
            raise CheckpointError(
                f"checkpoint.load_universal: got true, accepted: false, or a folder with {_LATEST_UNIVERSAL}, as "
                f"launch/to_universal.py writes it: {load_dir} has none"
            )
        return _last_finished(load_dir)
    try:
        named = latest.read_text(encoding="utf-8").strip()
        check_tag(named)
        there = replaced_or(load_dir / named).is_dir()
    except (OSError, ValueError) as problem:
        text = str(problem) if isinstance(problem, OSError | UnicodeError) else "it holds no name of a folder"
        raise CheckpointError(
            f"{latest}: cannot be used ({text}); load a checkpoint by its tag: {_there(load_dir)}"
        ) from None
    if not there or not any(replaced_or(load_dir / named).iterdir()):
        what = "is empty" if there else "is not there"
        raise CheckpointError(
            f"{latest}: names {named!r}, which {what}; load a checkpoint by its tag: {_there(load_dir)}"
        )
    if universal:
        _check_not_overtaken(load_dir, named)
    return _path_in(load_dir, named)


def _check_holds_checkpoints(load_dir: Path) -> None:
    """Refuse a checkpoint's own folder, and a file: for DeepSpeed there is nothing in either, and a run would begin
    anew."""
    if load_dir.exists() and not load_dir.is_dir():
        raise CheckpointError(f"load_dir: got {load_dir}, which is a file; accepted: a folder that holds checkpoints")
    folder = Path(os.path.abspath(load_dir)) if load_dir.name in ("", "..") else load_dir
    tag = own_name(folder)  # still "unfinished" where it never had another
    if not tag.startswith(_UNFINISHED) and is_checkpoint(folder):
        call = f"load_checkpoint({str(folder.parent)!r}, tag={tag!r})"
        raise CheckpointError(f"load_dir: got {load_dir}, which is a checkpoint itself; accepted: {call}")
    if tag.startswith(_UNFINISHED) and folder.is_dir():
        there = _there(folder.parent)
        raise CheckpointError(
            f"load_dir: got {load_dir}, a save that was never finished; accepted: {folder.parent}, with as tag {there}"
        )


def is_checkpoint(folder: Path) -> bool:
    """Of this project, or of plain DeepSpeed: that has no manifest, but model files in the folder itself."""
    with suppress(CheckpointError):
        read_manifest(folder, of_run=False)
        return True
    return any(folder.glob("*model_states.pt"))


def _check_not_overtaken(load_dir: Path, universal: str) -> None:
    """A run that saves where its universal checkpoint is would begin from that again at each start."""
    try:
        latest = (load_dir / LATEST).read_text(encoding="utf-8").strip()
        check_tag(latest)
        saved, start = (read_manifest(replaced_or(load_dir / tag), of_run=False) for tag in (latest, universal))
        steps, begun_at = saved["engine"]["global_steps"], start["progress"]["step"]
    except (OSError, ValueError, KeyError, TypeError):  # not written by this project
        return
    if not saved.get("universal") and steps > begun_at:
        raise CheckpointError(
            f"checkpoint.load_universal: got true, which means {load_dir / universal} of step {begun_at}, but {latest} "
            f"of step {steps} is there too; accepted: false, which loads {latest}, or tag={universal!r}"
        )


def _path_in(load_dir: Path, tag: str) -> str:
    return str(Path(tag).parent / replaced_or(load_dir / tag).name)


def _last_finished(load_dir: Path) -> str | None:
    found = _finished(load_dir)
    if not found:
        return None
    tag = max(found, key=lambda tag: (saved_at(found[tag]), tag))
    if rank_and_world()[0] == 0:
        print(f"warning: {load_dir / LATEST}: missing; {tag} was saved last", file=sys.stderr, flush=True)
    return _path_in(load_dir, tag)


def _finished(load_dir: Path) -> dict[str, dict[str, Any]]:
    """Manifests of the checkpoints that are complete and were to be found without their tag, by tag."""
    found = {}
    for tag, path in _folders(load_dir):
        try:
            manifest = read_manifest(path, of_run=False)
        except CheckpointError:
            continue
        if manifest.get(LATEST, True) and not manifest.get("universal"):
            found[tag] = manifest
    return found


def _folders(load_dir: Path, inside: str = "") -> Iterator[tuple[str, Path]]:
    """What may be a checkpoint, by tag: folders, and those in folders that are none themselves.

    Raises:
        OSError: ``load_dir`` cannot be read. A folder in it that cannot, as ``lost+found``, holds nothing to load.
    """
    for path in _listed(load_dir / inside, needed=not inside):
        name = own_name(path)
        if name.startswith(_UNFINISHED):
            continue  # of a save or a removal that was cut: the next save removes it
        tag = f"{inside}/{name}" if inside else name
        if os.path.isfile(path / MANIFEST):
            # A deeper one may be of another folder of checkpoints, which has a `latest` of its own.
            if not inside or _says(path) == tag:
                yield tag, path
        elif tag.count("/") + 1 < _DEEP and not os.path.islink(path):
            yield from _folders(load_dir, tag)


def _listed(folder: Path, needed: bool) -> list[Path]:
    try:
        os.stat(os.path.join(folder, "."))  # an error where names can be listed and nothing be opened
        return sorted(folder.iterdir())
    except OSError as problem:
        if needed and not isinstance(problem, FileNotFoundError | NotADirectoryError):
            raise
        return []


def _says(checkpoint: Path) -> Any:
    """The tag that a checkpoint was saved with."""
    with suppress(CheckpointError):
        return read_manifest(checkpoint, of_run=False).get("tag")
    return None


def _there(load_dir: Path) -> str:
    """What there is, for an error."""
    try:
        tags = dict.fromkeys(tag for tag, _ in _folders(load_dir))
    except OSError:
        return "one that is there"
    return ", ".join(tags) or "one that is there (none in this folder was saved by a coat engine)"
