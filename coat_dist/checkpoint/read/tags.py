"""Lookup of the checkpoint that ``engine.load_checkpoint`` means: by its tag, by ``latest``, or the one saved last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ...ranks import rank_and_world
from ..manifest import MANIFEST, read_manifest
from ..team import CheckpointError, Team
from ..write.publish import HIDDEN, LATEST, last_saved, own_name, replaced_or

__all__ = ["find_tag", "is_checkpoint"]

_LATEST_UNIVERSAL = "latest_universal"


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
    found = team.ask_leader(lambda: _find(load_dir, tag, universal))
    team.agree(lambda: {LATEST: None if found is None else str(Path(found).with_name(own_name(Path(found))))})
    return found


def _find(load_dir: Path, tag: str | None, universal: bool) -> str | None:
    named_by: object = "tag"
    if tag is None:
        named_by = latest = load_dir / (_LATEST_UNIVERSAL if universal else LATEST)
        if not os.path.lexists(latest):
            return _without_latest(load_dir, universal)
        try:
            tag = latest.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as problem:
            there = _there(load_dir)
            raise CheckpointError(f"{latest}: cannot be read ({problem}), accepted: a tag: {there}") from None
    parts = tag.split("/")
    if not tag.isprintable() or any(p in ("", ".", "..") or p.startswith(HIDDEN) for p in parts):
        why = "which is not the name of a finished checkpoint"
    elif not is_checkpoint(replaced_or(load_dir / tag)):
        _refuse_checkpoints_folder(load_dir)
        why = f"which is no checkpoint in {load_dir}"
    else:
        if universal and named_by != "tag":
            _check_not_overtaken(load_dir, tag)
        return str(Path(tag).with_name(replaced_or(load_dir / tag).name))
    raise CheckpointError(f"{named_by}: got {tag!r}, {why}, accepted: {_there(load_dir)}")


def _without_latest(load_dir: Path, universal: bool) -> str | None:
    _refuse_checkpoints_folder(load_dir)
    if universal:
        raise CheckpointError(
            f"checkpoint.load_universal: got true, accepted: false, or a folder with {_LATEST_UNIVERSAL}, as "
            f"launch/to_universal.py writes it: {load_dir} has none"
        )
    found = last_saved(_checkpoints(load_dir), universal=False)
    if found is None:
        return None
    if rank_and_world()[0] == 0:
        print(f"warning: {load_dir / LATEST}: missing; {own_name(found)} was saved last", file=sys.stderr, flush=True)
    return replaced_or(load_dir / own_name(found)).name


def _refuse_checkpoints_folder(load_dir: Path) -> None:
    """Refuse a checkpoint's own folder, and a file: DeepSpeed finds nothing in either, and a run would start again."""
    if load_dir.exists() and not load_dir.is_dir():
        raise CheckpointError(f"load_dir: got {load_dir}, which is a file; accepted: a folder that holds checkpoints")
    if is_checkpoint(load_dir):
        folder = Path(os.path.abspath(load_dir))
        call = f"load_checkpoint({str(folder.parent)!r}, tag={own_name(folder)!r})"
        raise CheckpointError(f"load_dir: got {load_dir}, which is a checkpoint itself; accepted: {call}")


def is_checkpoint(folder: Path) -> bool:
    """Of this project, or of plain DeepSpeed: that has no manifest, but model files in the folder itself."""
    return os.path.isfile(folder / MANIFEST) or any(folder.glob("*model_states.pt"))


def _check_not_overtaken(load_dir: Path, universal: str) -> None:
    """A run that saves where its universal checkpoint is would begin from that again at each start."""
    try:
        latest = (load_dir / LATEST).read_text(encoding="utf-8").strip()
        saved, start = (read_manifest(replaced_or(load_dir / tag), of_run=False) for tag in (latest, universal))
        steps, begun_at = saved["engine"]["global_steps"], start["progress"]["step"]
    except (OSError, ValueError, KeyError, TypeError):  # not written by this project
        return
    if not saved.get("universal") and steps > begun_at:
        raise CheckpointError(
            f"checkpoint.load_universal: got true, which means {load_dir / universal} of step {begun_at}, but {latest} "
            f"of step {steps} is there too; accepted: false, which loads {latest}, or tag={universal!r}"
        )


def _checkpoints(load_dir: Path) -> list[Path]:
    """Folders with a manifest, also those that a kill left under another name.

    Raises:
        OSError: ``load_dir`` cannot be read.
    """
    if not load_dir.is_dir():
        return []
    os.stat(os.path.join(load_dir, "."))  # an error where names can be listed and nothing be opened
    found = [p for p in sorted(load_dir.iterdir()) if os.path.isfile(p / MANIFEST)]
    return [p for p in found if not own_name(p).startswith(HIDDEN)]


def _there(load_dir: Path) -> str:
    """The tags that there are, for an error."""
    try:
        tags = dict.fromkeys(own_name(path) for path in _checkpoints(load_dir))
    except OSError:
        tags = {}
    return ", ".join(tags) or "one that is there (none in this folder was saved by a coat engine)"
