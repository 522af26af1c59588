"""Checkpoints that survive a kill or an error at any moment, and are checked before they are believed.

DeepSpeed writes its files into a folder with a temporary name; each rank adds its random states. Every file is brought
to disk, size and checksum of each are listed in ``manifest.json``, then rank 0 renames the folder and replaces
``latest`` (``publish.py``). Only after that older ones go. Loading verifies the list and compares what the checkpoint
was made by with what is about to load it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coat_dist import CoatConfigError
from coat_dist.checkpoint.durable import make_folder
from coat_dist.checkpoint.manifest import FORMAT, CheckpointError, differences, read_manifest, sync_files, verify
from coat_dist.checkpoint.publish import find, name_of, publish, retire, unfinished
from coat_dist.ranks import gather
from launch.training.runtime import get_random_state, reseed, set_random_state

__all__ = [
    "CheckpointError",
    "Examined",
    "differences",
    "examine",
    "find",
    "load",
    "publish",
    "read_manifest",
    "require_loadable",
    "restore",
    "save",
    "sync_files",
    "verify",
]

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
    engine: Any,
    folder: str | Path,
    run: Mapping[str, Any],
    progress: Mapping[str, Any],
    keep_last: int = 0,
    supersedes: Collection[Path] = (),
) -> Path:
    """Write a checkpoint; collective.

    Args:
        engine: DeepSpeed engine.
        folder: holds one folder a checkpoint and the file ``latest``.
        run: nested plain values that say what this run is; compared by :func:`load`.
        progress: plain values to get back from :func:`load`; ``progress["step"]`` names the checkpoint.
        keep_last: remove all but this many newest checkpoints afterwards; 0 = keep all.
        supersedes: checkpoints of an earlier run in ``folder``, to be removed afterwards.

    Returns:
        The folder of this checkpoint. What could not be removed is printed.

    Raises:
        CheckpointError: on every rank; names the file and the error. What was there before is untouched, and a later
            call may succeed.
    """
    folder = Path(folder)
    final = folder / name_of(progress["step"])
    temporary = unfinished(final)
    rank = dist.get_rank()

    def begin() -> None:
        make_folder(folder)
        if temporary.exists():
            shutil.rmtree(temporary)

    _together(begin if rank == 0 else None, f"cannot write {folder}")
    try:
        with _write_errors_kept(engine) as errors:
            engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
    except (OSError, RuntimeError) as error:  # none of writing: end this process, for other ranks may wait inside
        raise CheckpointError(f"cannot write {temporary}: {error}") from error

    def own_states() -> None:
        if errors:
            raise errors[0]
        torch.save(get_random_state(), temporary / _random_file(rank))

    _together(own_states, f"cannot write {temporary}")
    manifest = {"format": FORMAT, "progress": dict(progress), "run": run, "files": sync_files(temporary)}
    _together((lambda: publish(temporary, final, manifest)) if rank == 0 else None, f"cannot finish {final}")
    if rank == 0:
        for problem in retire(folder, final, keep_last, supersedes):
            print(f"warning: cannot remove an old checkpoint: {problem}", file=sys.stderr, flush=True)
    return final


def _together(work: Callable[[], None] | None, what: str) -> None:
    """Do this rank's part, and raise on every rank when one of them fails, so that none waits for another.

    Raises:
        CheckpointError: names ranks and errors.
    """
    problem = None
    if work is not None:
        try:
            work()
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            problem = f"{type(error).__name__}: {error}"
    failed = [f"rank {r}: {text}" for r, text in enumerate(gather(problem)) if text is not None]
    if failed:
        raise CheckpointError(f"{what}: " + "; ".join(failed))


@contextmanager
def _write_errors_kept(engine: Any) -> Iterator[list[Exception]]:
    """Errors of DeepSpeed's writing to disk, kept instead of raised.

    ``engine.save_checkpoint`` meets the other ranks after writing: a rank that left it would let them wait.
    """
    errors: list[Exception] = []

    def keeping(write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                path = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
                errors.append(OSError(f"{path}: {error}"))
                return None

        return attempt

    places = [
        (engine.checkpoint_engine, "save"),
        (engine.checkpoint_engine, "makedirs"),
        (engine, "_copy_recovery_script"),
    ]
    before = [vars(owner).get(name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, keeping(getattr(owner, name)))
    try:
        yield errors
    finally:
        for (owner, name), own in zip(places, before, strict=True):
            delattr(owner, name) if own is None else setattr(owner, name, own)  # without one, its class's is found


@dataclass(frozen=True)
class Examined:
    """A whole checkpoint that fits the run."""

    path: Path
    manifest: dict[str, Any]
    run: Mapping[str, Any]
    """What is about to load it."""
    changed: list[str]
    """A line for every setting that differs from the checkpoint's."""

    @property
    def universal(self) -> bool:
        """Whether it was written by ``launch/to_universal.py``."""
        return bool(self.manifest.get("universal"))


def examine(checkpoint: Path, run: Mapping[str, Any]) -> Examined:
    """Whether a run can load a checkpoint, and whether its files are whole; collective, needs no model.

    Raises:
        CheckpointError: damaged or missing files, or a checkpoint of another model or another parallel layout.
    """
    manifest = read_manifest(checkpoint)
    changed = differences(manifest["run"], run)
    structure = _UNIVERSAL_STRUCTURE if manifest.get("universal") else _STRUCTURE
    fatal = [line for key, line in changed.items() if _among(key, structure)]
    if fatal:
        hint = "" if any(_among(key, _UNIVERSAL_STRUCTURE) for key in changed) else f"\n{_CONVERSION}"
        raise CheckpointError(f"{checkpoint} was made by a different run:\n" + "\n".join(fatal) + hint)
    verify(checkpoint, manifest["files"])
    return Examined(checkpoint, manifest, run, [line for key, line in changed.items() if not _among(key, structure)])


def restore(engine: Any, examined: Examined) -> dict[str, Any]:
    """Restore model, optimizer and random states; collective.

    A universal checkpoint fits any parallel layout and ZeRO stage, and either optimizer. It holds no random states:
    they start anew, from the run's seed and the step.

    Returns:
        The ``progress`` given to :func:`save`.

    Raises:
        CheckpointError: DeepSpeed finds nothing to load.
    """
    checkpoint, progress = examined.path, examined.manifest["progress"]
    kept = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise CheckpointError(f"{checkpoint}: DeepSpeed found no model states in it")
    for group, own in zip(engine.optimizer.param_groups, kept, strict=True):
        group.update(own)  # hyperparameters are the configuration's, also where DeepSpeed restores one group's for all
    if examined.universal:
        reseed(examined.run["seed"] + progress["step"])
    else:
        set_random_state(torch.load(checkpoint / _random_file(dist.get_rank()), weights_only=True))
    return progress


def load(engine: Any, checkpoint: Path, run: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """:func:`examine` and :func:`restore`: the saved ``progress``, and a line for every setting that differs."""
    examined = examine(checkpoint, run)
    return restore(engine, examined), examined.changed


def _among(key: str, structure: tuple[str, ...]) -> bool:
    return key not in _FREE and key.startswith(structure)


def _random_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def require_loadable(folder: str | None, save: str | None) -> Path | None:
    """The checkpoint that ``--load`` means, or None for a fresh start.

    Raises:
        CoatConfigError: a folder was named that holds no checkpoint.
        CheckpointError: one that cannot be read.
    """
    if folder is None:
        return None
    found = find(save if folder == "auto" else folder)  # type: ignore[arg-type]
    if found is None and folder != "auto":
        raise CoatConfigError(
            f"--load: got {folder}, accepted: a folder with a file `latest`, one checkpoint's folder, or auto"
        )
    return found
