"""Where a run may write: not into what an earlier run left, unless it continues that run or was told to start anew."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST, read_manifest
from coat_dist.checkpoint.write.durable import make_folder
from coat_dist.checkpoint.write.lock import locked_folder
from coat_dist.checkpoint.write.publish import LATEST, own_name, published
from launch.train.arguments import TrainingOptions
from launch.train.checkpoint import require_loadable
from launch.train.metrics import read_metrics

__all__ = ["Folders", "open_folders"]

_ACCEPTED = "accepted: another folder, --load auto (with --save) to continue that run, or --overwrite to start anew"


@dataclass(frozen=True)
class Folders:
    """What :func:`open_folders` found."""

    source: Path | None
    """The checkpoint to continue from; None = a fresh start."""
    superseded: list[Path] = field(default_factory=list)
    """Checkpoints of an earlier run in ``--save``, to be removed when the first new one is complete."""


def open_folders(args: TrainingOptions, locks: ExitStack) -> Folders:
    """Find the checkpoint to load, make the folders to write to and lock them. Call it on one rank, before any writes.

    Args:
        args: ``load``, ``save``, ``output``, ``tensorboard`` and ``overwrite`` of the command line.
        locks: gets what keeps other runs out of ``save`` and ``output``; close it when the run has ended.

    Raises:
        CoatConfigError: a folder of an earlier run, one that another run is writing to, or one that cannot be written.
        CheckpointError: a checkpoint that cannot be read.
    """
    _look(args)  # before anything is made
    for name in ("save", "output", "tensorboard"):
        if (folder := getattr(args, name)) is not None:
            try:
                make_folder(Path(folder))
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as problem:
                raise CoatConfigError(
                    f"--{name}: got {folder}, accepted: a folder to write to ({problem})"
                ) from problem
    _lock(args, locks)
    return _look(args)  # again: another run may have written until the lock was ours


def _look(args: TrainingOptions) -> Folders:
    source = require_loadable(args.load, args.save)
    with _readable("--save"):
        superseded = _check_save(args, source)
    with _readable("--output"):
        _check_output(args, source)
    with _readable("--tensorboard"):
        _check_tensorboard(args, source)
    return Folders(source, superseded)


@contextmanager
def _readable(option: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CoatConfigError(f"{option}: cannot be read ({problem}), accepted: a folder to write to") from problem


def _lock(args: TrainingOptions, locks: ExitStack) -> None:
    mine = set()
    for name in ("save", "output"):
        folder = getattr(args, name)
        if folder is not None and (real := Path(folder).resolve()) not in mine:  # a second time would drop the first
            mine.add(real)
            locks.enter_context(locked_folder(Path(folder), f"--{name}", CoatConfigError))


def _check_save(args: TrainingOptions, source: Path | None) -> list[Path]:
    if args.save is None:
        return []
    folder = Path(args.save)
    if (folder / MANIFEST).exists():
        raise CoatConfigError(f"--save: got {args.save}, which is a checkpoint, accepted: a folder for checkpoints")
    if source is not None and source.parent == folder.resolve():
        if args.overwrite:
            raise CoatConfigError(
                f"--overwrite: got true, with --load {args.load}, which is in --save, accepted: one of the two"
            )
        return []
    found = published(folder)
    if not args.overwrite and (found or (folder / LATEST).exists()):
        raise CoatConfigError(f"--save: got {args.save}, which holds checkpoints of an earlier run, {_ACCEPTED}")
    return [p.with_name(own_name(p)) for p in found]  # the first save gives them back their names


def _check_output(args: TrainingOptions, source: Path | None) -> None:
    path = None if args.output is None else Path(args.output, "metrics.jsonl")
    if path is None or not path.exists() or args.overwrite or not (records := read_metrics(path)):
        return
    if source is None:
        # "auto" without a checkpoint is a run that was killed before its first: its records are put aside.
        if args.load != "auto":
            raise CoatConfigError(
                f"--output: got {args.output}, which holds metrics.jsonl of an earlier run, {_ACCEPTED}"
            )
        return
    progress = read_manifest(source)["progress"]
    keys = [key for key in ("step", "consumed_samples", "loss") if key in progress]
    if any(r["step"] > progress["step"] for r in records) and not any(
        all(r.get(key) == progress[key] for key in keys) for r in records
    ):
        raise CoatConfigError(
            f"--output: got {args.output}, whose metrics.jsonl is not of the run that saved {source}, accepted: that "
            "run's folder, another one, or --overwrite"
        )


def _check_tensorboard(args: TrainingOptions, source: Path | None) -> None:
    if args.tensorboard is None or source is not None or args.load == "auto" or args.overwrite:
        return
    if any(Path(args.tensorboard).glob("events.out.tfevents.*")):
        raise CoatConfigError(
            f"--tensorboard: got {args.tensorboard}, which holds events of an earlier run, {_ACCEPTED}"
        )
