"""Saving a DeepSpeed engine into a checkpoint folder, so that a kill or an error on any rank leaves the one before.

DeepSpeed writes its files into a folder with a temporary name, and the caller adds its own. Every file is brought to
disk, and ``manifest.json`` lists size and checksum of each (``manifest.py``). Then rank 0 renames the folder, replaces
``latest`` and removes what may go (``publish.py``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..ranks import gather, rank_and_world
from .durable import make_folder
from .manifest import FORMAT, CheckpointError, sync_files
from .publish import name_of, publish, retire, unfinished

__all__ = ["save_engine"]


def save_engine(
    engine: Any,
    folder: Path,
    step: int,
    content: Mapping[str, Any],
    add_files: Callable[[Path], None],
    keep_last: int = 0,
    supersedes: Collection[Path] = (),
) -> Path:
    """Write a checkpoint; collective.

    Args:
        engine: DeepSpeed engine.
        folder: holds one folder a checkpoint and the file ``latest``.
        step: names the checkpoint.
        content: plain values that its manifest holds beside the list of files.
        add_files: called on each rank with the folder to write files of its own into.
        keep_last: remove all but this many newest checkpoints afterwards; 0 = keep all.
        supersedes: checkpoints of an earlier run in ``folder``, to be removed afterwards.

    Returns:
        The folder of this checkpoint. What could not be removed is printed.

    Raises:
        CheckpointError: on every rank; names the file and the error. What was there before is untouched, and a later
            call may succeed.
    """
    final = folder / name_of(step)
    temporary = unfinished(final)
    rank = rank_and_world()[0]

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

    def own_files() -> None:
        if errors:
            raise errors[0]
        add_files(temporary)

    _together(own_files, f"cannot write {temporary}")
    manifest = {"format": FORMAT, **content, "files": sync_files(temporary)}
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
        except Exception as error:  # of any kind: `add_files` is the caller's, and the other ranks wait below
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
