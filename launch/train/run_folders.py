"""Where a run may write: not into what an earlier run left, unless it continues that run or got
``--overwrite``.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import read_manifest
from coat_dist.checkpoint.write.durable import make_folder
from coat_dist.checkpoint.write.publish import LATEST, own_name, published
from coat_dist.ranks import on_rank_0
from coat_dist.shared_folders import check_shared, check_there
from launch.common.lock import locked_folder
from launch.train.checkpoint import require_loadable
from launch.train.metrics import read_metrics
from launch.train.pretrain_options import PretrainOptions

_ACCEPTED = (
    "accepted: another folder, --load auto (with --save) to continue that run, or "
    "--overwrite to start anew"
)


@dataclass(frozen=True)
class Folders:
    """What :func:`open_folders` found."""

    source: Path | None
    """The checkpoint to continue from; None = a fresh start."""
    superseded: list[Path] = field(default_factory=list)
    """Checkpoints of an earlier run in ``--save``, to be removed when the first new one is
    complete.
    """


def open_on_nodes(args: PretrainOptions, locks: ExitStack) -> Folders:
    """What :func:`open_folders` finds on rank 0, on every rank; collective.

    Raises:
        CoatConfigError, CheckpointError: on every rank; also where nodes do not share ``--save`` or
            ``--load``.
    """
    folders = on_rank_0(lambda: open_folders(args, locks))
    if args.save is not None:
        check_shared(Path(args.save), "--save", CoatConfigError)
    if folders.source is not None:
        check_there(folders.source, "--load", CoatConfigError)
    return folders


def open_folders(args: PretrainOptions, locks: ExitStack) -> Folders:
    """Make the folders to write to, lock them and find the checkpoint to load. Call it on one rank,
    before any writes.

    Args:
        args: ``load``, ``save``, ``output``, ``tensorboard`` and ``overwrite`` of the command line.
        locks: gets what keeps other runs out of ``save`` and ``output``; close it when the run has
            ended.

    Raises:
        CoatConfigError: a folder of an earlier run, one that another run is writing to, or one that
            cannot be written.
        CheckpointError: a checkpoint that cannot be read.
    """
    locked = set[Path]()
    for name in ("save", "output", "tensorboard"):
        if (folder := getattr(args, name)) is None:
            continue
        try:
            make_folder(Path(folder))
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as problem:
            raise CoatConfigError(
                f"--{name}: got {folder}, accepted: a folder to write to ({problem})"
            ) from problem
        # A second lock drops the first.
        if name != "tensorboard" and (real := Path(folder).resolve()) not in locked:
            locked.add(real)
            locks.enter_context(locked_folder(Path(folder), f"--{name}", CoatConfigError))
    source = require_loadable(args.load, args.save)
    superseded = _check_save(args, source)
    _check_output(args, source)
    return Folders(source, superseded)


def _check_save(args: PretrainOptions, source: Path | None) -> list[Path]:
    if args.save is None or (source is not None and source.parent == Path(args.save).resolve()):
        return []
    folder = Path(args.save)
    found = published(folder)
    if not args.overwrite and (found or (folder / LATEST).exists()):
        raise CoatConfigError(
            f"--save: got {args.save}, which holds checkpoints of an earlier run, {_ACCEPTED}"
        )
    return [p.with_name(own_name(p)) for p in found]  # the first save gives them back their names


def _check_output(args: PretrainOptions, source: Path | None) -> None:
    path = None if args.output is None else Path(args.output, "metrics.jsonl")
    if path is None or not path.exists() or args.overwrite or not (records := read_metrics(path)):
        return
    if source is None:
        # "auto" without a checkpoint is a run that was killed before its first: its records are put
        # aside.
        if args.load != "auto":
            raise CoatConfigError(
                f"--output: got {args.output}, which holds metrics.jsonl of an earlier run, "
                f"{_ACCEPTED}"
            )
        return
    progress = read_manifest(source)["progress"]
    last = {key: progress[key] for key in ("step", "consumed_samples", "loss") if key in progress}
    if any(r["step"] > progress["step"] for r in records) and not any(
        last.items() <= r.items() for r in records
    ):
        raise CoatConfigError(
            f"--output: got {args.output}, whose metrics.jsonl is not of the run that saved "
            f"{source}, accepted: that "
            "run's folder, another one, or --overwrite"
        )
