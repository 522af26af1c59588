"""The files of one output: who may write them, whether they are complete, what a killed run left."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from launch.data.tokenizer import tokenizer_digest
from launch.prep import DataError
from launch.prep.shards import read_json, write_json

__all__ = ["finished", "locked", "open_parts"]


def _compare(then: Any, now: dict[str, Any], what: str) -> None:
    """Refuse to continue or keep what other settings made."""
    then = then if isinstance(then, dict) else {}
    changed = [
        "files_digest: names, sizes or times of input files are not those of then"
        if key == "files_digest"
        else f"{key}: {then.get(key)!r} then, {now.get(key)!r} now"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if changed:
        raise DataError(
            f"--output: {what} was made with other settings ({'; '.join(changed)}), accepted: the same settings, "
            "another --output, or --overwrite"
        )


@contextlib.contextmanager
def locked(prefix: str, parts: Path) -> Iterator[None]:
    """Make the output folder and hold a lock on it; the system drops the lock of a process that dies."""
    if not Path(prefix).name or os.path.isdir(prefix):
        raise DataError(
            f"--output: got {prefix!r}, which is a folder, accepted: a folder and the beginning of a file name"
        )
    # Imported late: it brings torch, which takes seconds, and workers, which import this file, do not need it.
    from coat_dist.checkpoint.write import lock

    with contextlib.ExitStack() as held:
        try:
            parts.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock.locked(Path(f"{prefix}.lock")))
        except BlockingIOError:
            raise DataError(
                f"--output: another process is writing {prefix}, accepted: wait for it or another --output"
            ) from None
        except OSError as problem:  # a file system without locks, too
            if any(os.path.isfile(one) for one in Path(prefix).parents):
                accepted = "accepted: a folder and the beginning of a file name"
                raise DataError(f"--output: got {prefix!r}, which would be below a file, {accepted}") from None
            raise DataError(f"--output: cannot write {prefix}.*: {problem.strerror}") from None
        yield


def finished(prefix: str, settings: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output is complete and of these settings; refuses to touch any other."""
    if overwrite:
        return False
    summary = read_json(f"{prefix}.json")
    if summary is None or "settings" not in summary:
        for kind in ("json", "bin", "idx"):
            if Path(f"{prefix}.{kind}").exists() and not Path(f"{prefix}.parts").exists():
                raise DataError(
                    f"--output: {prefix}.{kind} exists and was not made by this program, accepted: another --output, "
                    "or --overwrite"
                )
        return False
    _compare(summary["settings"], settings, f"{prefix}.bin")
    from launch.data.dataset import indexed_lengths  # late: it brings torch

    try:
        lengths = indexed_lengths(prefix)
        there: dict[str, Any] = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
        if tokenizer := summary.get("tokenizer_file"):
            there["tokenizer_digest"] = tokenizer_digest(Path(prefix).with_name(tokenizer), summary["eod"])
    except (DataError, OSError):
        return False
    return there == {key: summary.get(key) for key in there}


def open_parts(prefix: str, parts: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Continue the folder of finished shards if it is of these settings, or start it."""
    manifest = read_json(parts / "manifest.json")
    if manifest is not None and manifest != settings:
        if not overwrite:
            _compare(manifest, settings, str(parts))
        manifest = None
    if manifest is None:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        write_json(parts / "manifest.json", settings)
    ours = [f"{Path(prefix).name}.{kind}" for kind in ("bin", "idx", "json")]
    for file in [*parts.iterdir(), *parts.parent.iterdir()]:  # what a killed run left half written
        stem, mark, _ = file.name.partition(".tmp")
        if mark and (file.parent == parts or stem in ours):
            file.unlink(missing_ok=True)
