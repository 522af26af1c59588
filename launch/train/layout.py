"""Continuing on other ranks: ``--load auto`` where the newest checkpoint was saved by another parallel layout.

Its samples a step are kept, and rank 0 converts it to a universal checkpoint, in the folder :data:`FOLDER` of
``--save``, which is removed when the first checkpoint of the new layout is complete.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest, verify
from coat_dist.checkpoint.write.publish import name_of, own_name
from coat_dist.config import look_up
from coat_dist.ranks import alone, on_rank_0
from launch.log_level import say
from launch.model.sizes import parameter_count
from launch.train import checkpoint
from launch.train.arguments import TrainingOptions
from launch.train.settings import MICRO, STEPS, TOTAL

__all__ = ["FOLDER", "KeptBatch", "fitting", "forget", "keep_batch"]

FOLDER = ".converted"
"""In ``--save``. Nothing but conversions is in it, and all of it may be removed at any time."""
_GOING = ".unfinished-converted"
"""What :data:`FOLDER` is called while it is removed."""
_BYTES = 14
"""Of a parameter in a universal checkpoint: fp32 weight and moments, FP8 codes."""


class KeptBatch(NamedTuple):
    """What :func:`keep_batch` has done."""

    line: str
    """For the log."""
    given: list[Any]
    """The three batch sizes of the configuration, which are not those of the run."""


def keep_batch(args: TrainingOptions, settings: dict[str, Any], dp: int, auto: bool) -> KeptBatch | None:
    """Keep the samples of a step where ``--load auto`` continues a run of another number of data-parallel ranks.

    Or of as many, where that run had kept its samples and is started with the same configuration again.

    ``settings`` get the three batch sizes: train_batch_size as they have it, or else the checkpoint's; the micro-batch
    they have, or the largest smaller one that divides what a rank has to do; and the accumulation that follows.

    Args:
        auto: the micro-batch is to be found: only the samples of a step are set.

    Returns:
        None where nothing is to be kept. A checkpoint that cannot be read is told later.

    Raises:
        CoatConfigError: the ranks do not divide the samples of a step.
    """
    if getattr(args, "load", None) != "auto" or not args.save:
        return None
    try:
        source = checkpoint.require_loadable("auto", args.save)
        run = None if source is None else read_manifest(source)["run"]
    except CheckpointError:
        return None
    saved, batch = (run or {}).get("parallel", {}).get("data"), (run or {}).get("batch", {})
    total, given = settings.get(TOTAL) or batch.get("total"), [settings.get(key) for key in (MICRO, STEPS, TOTAL)]
    again = saved == dp and batch.get("given") == given
    if saved is None or (saved == dp and not again) or type(total) is not int or total < 1:
        return None
    if total % dp:
        whose = "the DeepSpeed file" if settings.get(TOTAL) else f"{source}, by {saved} data-parallel ranks"
        raise CoatConfigError(
            f"{TOTAL}: got {total} (of {whose}) with {dp} data-parallel ranks, accepted: a number of data-parallel "
            f"ranks that divides it, or {TOTAL} in the DeepSpeed file as a multiple of {dp}"
        )
    settings[TOTAL], each, micro = total, total // dp, settings.get(MICRO) or batch.get("micro")
    if auto:
        settings.pop(STEPS, None)
        return KeptBatch(f"batch: {total} samples a step, as {source} has them", given)
    if not isinstance(micro, int) or isinstance(micro, bool) or micro < 1:
        return None
    divisors = [m for m in range(min(micro, each), 0, -1) if each % m == 0]
    stages = args.pipeline_parallel if args.virtual_stages > 1 else 1  # parts of stages take turns: check_micro_batches
    micro = next((m for m in divisors if each // m % stages == 0), divisors[0])
    settings[MICRO], settings[STEPS] = micro, each // micro
    before = f"as {source} has them" if again else f"as with {saved} data-parallel ranks; now {dp}"
    line = f"batch: {total} samples a step, {before}, with micro-batches of {micro} and {each // micro} of them a step"
    return KeptBatch(line, given)


def fitting(source: Path, p: Any) -> Path:
    """The checkpoint to load where ``--load auto`` means ``source``: that one, or its conversion; collective.

    Rank 0 converts, however long it takes, while the others wait; a conversion that is there and whole is taken.

    Args:
        source: a whole checkpoint of pretrain.py or finetune.py, in ``--save``.
        p: the :class:`launch.train.plan.Plan` of this start.

    Raises:
        CheckpointError: on every rank; it cannot be converted, or there is no space for it.
    """
    if p.args.load != "auto" or look_up(p.settings, "checkpoint.use_node_local_storage"):
        return source  # of nodes' own disks no process sees all: the layout is refused
    another, files, there = on_rank_0(lambda: _look(source, p))
    if there is not None:
        try:
            verify(there, files)
            say(f"{own_name(source)} was converted before: continuing from {there}")
            return there
        except CheckpointError as problem:
            say(f"warning: a conversion that was there is converted again: {problem}", "warning")
    return on_rank_0(lambda: _convert(source, p), patient=True) if another else source


def _look(source: Path, p: Any) -> tuple[bool, dict[str, list[int]], Path | None]:
    """Whether ``source`` is to be converted, and a finished conversion of it with its files. All others are removed."""
    manifest = read_manifest(source)
    there = source.parent / FOLDER / name_of(manifest["progress"]["step"])
    another = bool(checkpoint.of_another_layout(manifest, p.identity()))
    if another and (there / MANIFEST).is_file():
        with suppress(CheckpointError):
            found = read_manifest(there)
            if found.get("universal") and all(found[key] == manifest[key] for key in ("run", "progress")):
                return another, found["files"], there
    forget(source.parent)
    return another, {}, None


def _convert(source: Path, p: Any) -> Path:
    from launch.to_universal import convert

    folder = source.parent / FOLDER
    forget(source.parent)  # of a conversion that was damaged
    lines = checkpoint.of_another_layout(read_manifest(source), p.identity())
    need, free = _BYTES * parameter_count(p.model), shutil.disk_usage(source.parent).free
    if need > free:
        raise CheckpointError(
            f"--load auto: {source} has another layout ({'; '.join(lines)}); its conversion needs about "
            f"{need / 1e9:.2f} GB and {source.parent} has {free / 1e9:.2f} GB free, accepted: more space, or --load of "
            "what launch/to_universal.py has written elsewhere"
        )
    say(
        f"converting {source}: {'; '.join(lines)}; needs about {need / 1e9:.2f} GB of {free / 1e9:.2f} GB that are "
        f"free, until the next checkpoint is complete"
    )
    began = time.monotonic()
    with alone():
        made = convert(source, folder)
    size = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    say(f"converted in {time.monotonic() - began:.1f} s: {made}, {size / 1e9:.2f} GB")
    return made


def forget(save: str | Path) -> None:
    """Remove what was converted in the folder of checkpoints ``save``; what cannot be removed is a warning."""
    folder, going = Path(save, FOLDER), Path(save, _GOING)
    try:
        if going.exists():
            shutil.rmtree(going)
        if folder.exists():
            os.rename(folder, going)  # in one go: a kill leaves nothing that looks finished
            shutil.rmtree(going)
    except OSError as problem:
        print(f"warning: cannot remove {folder}: {problem}", file=sys.stderr, flush=True)
