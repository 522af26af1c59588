"""Lookup of the checkpoint that ``engine.load_checkpoint`` means: by its tag, by ``latest``, or
the one saved last.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...ranks import say_on_rank_0
from ..manifest import MANIFEST, TEAM, CheckpointError, readable
from ..write.publish import (
    HIDDEN,
    LATEST,
    checkpoints,
    last_saved,
    latest_of,
    own_name,
    replaced_or,
)

_LATEST_UNIVERSAL = "latest_universal"


def find_tag(load_dir: Path, tag: str | None, universal: bool) -> str | None:
    """The name of the folder in ``load_dir`` that is meant, None where there is no checkpoint;
    collective.

    Without ``tag`` it is the one that ``latest`` names (with ``checkpoint.load_universal``:
    ``latest_universal``), or, where a kill in the first save left no ``latest``, the one that was
    saved last.

    Raises:
        CheckpointError: on every rank; ``latest`` or ``tag`` names something other than a finished
            checkpoint.
    """
    return TEAM.on_rank_0(lambda: _find(load_dir, tag, universal))


def _find(load_dir: Path, tag: str | None, universal: bool) -> str | None:
    named_by = "tag"
    if tag is None:
        name = _LATEST_UNIVERSAL if universal else LATEST
        named_by = str(load_dir / name)
        try:
            tag = latest_of(load_dir, name)
        except (OSError, ValueError) as problem:
            raise CheckpointError(
                f"{named_by}: got {problem}, accepted: a tag: {_there(load_dir)}"
            ) from None
        if tag is None:
            return _without_latest(load_dir, universal)
    found = replaced_or(load_dir / tag) if Path(tag).name == tag else load_dir
    if found == load_dir or not tag.isprintable() or tag.startswith((HIDDEN, "..")):
        why = "which is not the name of a finished checkpoint"
    elif not is_checkpoint(found):
        _refuse_checkpoints_folder(load_dir)
        why = f"which is no checkpoint in {load_dir}"
    else:
        if universal and named_by != "tag":
            _check_not_overtaken(load_dir, tag)
        return found.name
    raise CheckpointError(f"{named_by}: got {tag!r}, {why}, accepted: {_there(load_dir)}")


def _without_latest(load_dir: Path, universal: bool) -> str | None:
    _refuse_checkpoints_folder(load_dir)
    if universal:
        raise CheckpointError(
            "checkpoint.load_universal: got true, accepted: false, or a folder with "
            f"{_LATEST_UNIVERSAL}, as launch/to_universal.py writes it: {load_dir} has none"
        )
    found = last_saved(checkpoints(load_dir), universal=False)
    if found is None:
        return None
    say_on_rank_0(f"warning: {load_dir / LATEST}: missing; {own_name(found)} was saved last")
    return replaced_or(load_dir / own_name(found)).name


def _refuse_checkpoints_folder(load_dir: Path) -> None:
    """Refuse a checkpoint's own folder, and a file: DeepSpeed finds nothing in either, and a run
    would start again.
    """
    if load_dir.exists() and not load_dir.is_dir():
        raise CheckpointError(
            f"load_dir: got {load_dir}, which is a file; accepted: a folder that holds checkpoints"
        )
    if is_checkpoint(load_dir):
        folder = Path(os.path.abspath(load_dir))
        call = f"load_checkpoint({str(folder.parent)!r}, tag={own_name(folder)!r})"
        raise CheckpointError(
            f"load_dir: got {load_dir}, which is a checkpoint itself; accepted: {call}"
        )


def is_checkpoint(folder: Path) -> bool:
    """Of this project, or of plain DeepSpeed: that has no manifest, but model files in the
    folder itself.
    """
    return os.path.isfile(folder / MANIFEST) or any(folder.glob("*model_states.pt"))


def _check_not_overtaken(load_dir: Path, universal: str) -> None:
    """A run that saves where its universal checkpoint is would begin from that again at each
    start.
    """
    try:
        latest = latest_of(load_dir) or ""
        saved, start = (readable(replaced_or(load_dir / tag)) for tag in (latest, universal))
        steps, begun_at = saved["engine"]["global_steps"], start["progress"]["step"]
    except (OSError, ValueError, KeyError):  # not written by this project
        return
    if not saved.get("universal") and steps > begun_at:
        raise CheckpointError(
            f"checkpoint.load_universal: got true, which means {load_dir / universal} of step "
            f"{begun_at}, but {latest} of step {steps} is there too; accepted: false, which loads "
            f"{latest}, or tag={universal!r}"
        )


def _there(load_dir: Path) -> str:
    """The tags that there are, for an error."""
    tags = dict.fromkeys(own_name(path) for path in checkpoints(load_dir))
    return ", ".join(tags) or "one that is there (none in this folder was saved by a coat engine)"
