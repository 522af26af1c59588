"""Checkpoints that survive a kill at any moment, and are checked before they are believed.

DeepSpeed writes its files into a folder with a temporary name; each rank adds its random states. Rank 0 lists size and
checksum of every file in ``manifest.json``, renames the folder and replaces ``latest`` in one go. Loading verifies the
list and compares what the checkpoint was made by with what is about to load it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from launch.manifest import FORMAT, MANIFEST, CheckpointError, checksums, differences, read_manifest, verify
from launch.runtime import get_random_state, reseed, set_random_state

__all__ = [
    "CheckpointError",
    "checksums",
    "differences",
    "find",
    "is_universal",
    "load",
    "publish",
    "read_manifest",
    "require_loadable",
    "save",
    "verify",
]

_LATEST, _UNFINISHED = "latest", ".unfinished-"
# A checkpoint cannot be loaded where one of these differs. Other differences are reported and taken as wanted.
_STRUCTURE = (
    "model.",
    "parallel.",
    "deepspeed.zero_optimization.stage",
    "deepspeed.zero_optimization.round_robin_gradients",
    "deepspeed.zero_optimization.parameter_alignment",
    "deepspeed.zero_optimization.sub_group_size",
    "deepspeed.optimizer.type",
    "deepspeed.coat.optimizer",
    "deepspeed.data_types",
    "format",
)
_UNIVERSAL_STRUCTURE = ("model.", "format")
_CONVERSION = "launch/to_universal.py converts it for other parallel sizes, ZeRO stages and optimizers"
_FREE = (
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.seq_length",
    "model.moe_aux_loss_coeff",
    "model.moe_token_dispatcher_type",
    "parallel.sequence_parallel",
)


def save(
    engine: Any, folder: str | Path, run: Mapping[str, Any], progress: Mapping[str, Any], keep_last: int = 0
) -> Path:
    """Write a checkpoint; collective.

    Args:
        engine: DeepSpeed engine.
        folder: holds one folder a checkpoint and the file ``latest``.
        run: nested plain values that say what this run is; compared by :func:`load`.
        progress: plain values to get back from :func:`load`; ``progress["step"]`` names the checkpoint.
        keep_last: remove all but this many newest checkpoints afterwards; 0 = keep all.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: it could not be written; what was there before is untouched. End the process then.
    """
    folder = Path(folder)
    name = f"step{progress['step']:08d}"
    temporary, final = folder / (_UNFINISHED + name), folder / name
    rank = dist.get_rank()
    problem: Exception | None = None
    try:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        problem = error
    _agree(problem, f"cannot write {folder}")
    try:
        # It synchronizes ranks itself: one that fails here must end its process, for the others wait inside.
        engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
        torch.save(get_random_state(), temporary / _random_file(rank))
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(f"cannot write {temporary}: {error}") from error
    dist.barrier()
    listing: list[Any] = [sorted(p.name for p in temporary.iterdir() if p.is_file()) if rank == 0 else None]
    dist.broadcast_object_list(listing)
    sums = checksums(temporary, listing[0], sync=True)
    if rank == 0:
        try:
            manifest = {"format": FORMAT, "progress": dict(progress), "run": run, "files": sums}
            publish(temporary, final, manifest)
            _remove_old(folder, keep_last)
        except OSError as error:
            problem = error
    _agree(problem, f"cannot finish {final}")
    return final


def publish(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Turn a written folder into the newest checkpoint, in an order that survives a kill at any point.

    Raises:
        OSError: the checkpoint that was ``final`` before is then under a name with ``.unfinished-`` or untouched.
    """
    _write(temporary / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():  # the same step again, after a restart from an older checkpoint
        shutil.rmtree(_replaced(final), ignore_errors=True)  # of a save that was killed after the next line but one
        os.rename(final, _replaced(final))
    os.rename(temporary, final)
    _write(final.parent / _LATEST, final.name)


def find(folder: str | Path) -> Path | None:
    """The checkpoint that ``folder`` means: itself, or the one its ``latest`` names; None where it holds none.

    Raises:
        CheckpointError: ``latest`` names something that is not there.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return folder
    try:
        name = (folder / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not (folder / name / MANIFEST).is_file():
        if (_replaced(folder / name) / MANIFEST).is_file():  # killed while a step was saved for the second time
            return _replaced(folder / name)
        others = ", ".join(p.name for p in _finished(folder)) or "none"
        raise CheckpointError(f"{folder / _LATEST}: names {name!r}, which is no checkpoint; there are: {others}")
    return folder / name


def _replaced(final: Path) -> Path:
    """Where a checkpoint is while another of its name takes its place."""
    return final.parent / f"{_UNFINISHED}replaced-{final.name}"


def load(engine: Any, checkpoint: Path, run: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Restore model, optimizer and random states; collective.

    A universal checkpoint fits any parallel layout and ZeRO stage, and either optimizer. It holds no random states:
    they start anew, from the run's seed and the step.

    Returns:
        The ``progress`` given to :func:`save`, and a line for every setting that differs from the checkpoint's.

    Raises:
        CheckpointError: damaged or missing files, or a checkpoint of another model or another parallel layout.
    """
    manifest = read_manifest(checkpoint)
    changed = differences(manifest["run"], run)
    universal = bool(manifest.get("universal"))
    structure = _UNIVERSAL_STRUCTURE if universal else _STRUCTURE
    fatal = [line for key, line in changed.items() if _among(key, structure)]
    if fatal:
        hint = "" if any(_among(key, _UNIVERSAL_STRUCTURE) for key in changed) else f"\n{_CONVERSION}"
        raise CheckpointError(f"{checkpoint} was made by a different run:\n" + "\n".join(fatal) + hint)
    verify(checkpoint, manifest["files"])
    kept = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise CheckpointError(f"{checkpoint}: DeepSpeed found no model states in it")
    for group, own in zip(engine.optimizer.param_groups, kept, strict=True):
        group.update(own)  # hyperparameters are the configuration's, also where DeepSpeed restores one group's for all
    if universal:
        reseed(run["seed"] + manifest["progress"]["step"])
    else:
        set_random_state(torch.load(checkpoint / _random_file(dist.get_rank()), weights_only=True))
    return manifest["progress"], [line for key, line in changed.items() if not _among(key, structure)]


def is_universal(checkpoint: Path) -> bool:
    """Whether a checkpoint was written by ``launch/to_universal.py``."""
    return bool(read_manifest(checkpoint).get("universal"))


def _among(key: str, structure: tuple[str, ...]) -> bool:
    return key not in _FREE and key.startswith(structure)


def _random_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def _agree(problem: Exception | None, what: str) -> None:
    """Raise on every rank when one of them has a problem, so that none waits for another; also a barrier."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if problem is None else f"{type(problem).__name__}: {problem}")
    failed = [f"rank {r}: {text}" for r, text in enumerate(everyone) if text is not None]
    if failed:
        raise CheckpointError(f"{what}: " + "; ".join(failed))


def _write(path: Path, text: str) -> None:
    """Replace a file in one go, after its content has reached the disk."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _finished(folder: Path) -> list[Path]:
    """Finished checkpoints, in the order in which they were written."""
    manifests = [p for p in folder.glob(f"step*/{MANIFEST}") if p.is_file()]
    return [p.parent for p in sorted(manifests, key=lambda p: (p.stat().st_mtime_ns, p))]


def _remove_old(folder: Path, keep: int) -> None:
    for leftover in folder.glob(_UNFINISHED + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for old in _finished(folder)[:-keep] if keep else []:
        if old.name != (folder / _LATEST).read_text(encoding="utf-8").strip():
            (old / MANIFEST).unlink()  # first, so that a kill in between leaves no checkpoint that looks whole
            shutil.rmtree(old, ignore_errors=True)


def require_loadable(folder: str | None, save: str | None) -> Path | None:
    """The checkpoint that ``--load`` means, or None for a fresh start.

    Raises:
        CoatConfigError: a folder was named that holds no checkpoint.
    """
    if folder is None:
        return None
    found = find(save if folder == "auto" else folder)  # type: ignore[arg-type]
    if found is None and folder != "auto":
        raise CoatConfigError(
            f"--load: got {folder}, accepted: a folder with a file `latest`, one checkpoint's folder, or auto"
        )
    return found
