"""``manifest.json`` of a finished checkpoint: size and checksum of each file, and what the
engine was.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..optim import CoatAdamW
from ..ranks import Team, gather, leaves, rank_and_world, share
from .names import divided_experts, info_of, place_in_pipeline
from .write.durable import walk

FORMAT = 1
MANIFEST = "manifest.json"
UNFINISHED = {"format": FORMAT, "unfinished": True}
"""The manifest of a folder that is being written."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message names it and the reason."""


TEAM = Team(CheckpointError)
"""The ranks, which write to one folder and read from it."""


def describe(engine: Any) -> dict[str, Any]:
    """The engine's part of a manifest; loading compares it with the engine that is there then."""
    info = info_of(engine)
    stages = place_in_pipeline(info)[1]
    stepped = getattr(engine.optimizer, "optimizer", engine.optimizer)  # in ZeRO's, or itself
    name = CoatAdamW.__name__ if isinstance(stepped, CoatAdamW) else type(stepped).__name__
    return {
        "world_size": rank_and_world()[1],
        "zero_stage": engine.zero_optimization_stage(),
        # With sequence parallelism (Ulysses), ZeRO's shards are divided by data- times
        # sequence-parallel ranks.
        "data_parallel": engine.seq_dp_world_size,
        "tensor_parallel": engine.mp_world_size // stages,
        "pipeline_stages": stages,
        "expert_parallel": divided_experts(info)[0],
        "global_steps": engine.global_steps,
        "optimizer": None if stepped is None else name,
    }


def read_manifest(checkpoint: Path, of_run: bool = True) -> dict[str, Any]:
    """The manifest of a finished checkpoint.

    Args:
        checkpoint: its folder.
        of_run: it was saved by ``launch/pretrain.py``, whose manifests say what the run was and how
            far it had come.

    Raises:
        CheckpointError: missing, unreadable, of another format, or without what every finished
            checkpoint has in it.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format: got another one, accepted: {FORMAT}")
    if manifest.get("unfinished"):
        raise CheckpointError(
            f"{checkpoint}: was never finished, accepted: a checkpoint whose saving had ended"
        )
    needed = ("progress", "run", "files") if of_run else ("files",)
    if missing := [key for key in needed if not isinstance(manifest.get(key), dict)]:
        raise CheckpointError(
            f"{path}: got no {', '.join(missing)}, accepted: the manifest of a checkpoint"
            f"{' of launch/pretrain.py' if of_run else ''}"
        )
    return manifest


def readable(checkpoint: Path) -> dict[str, Any]:
    """What a manifest says, unchecked; empty where it is missing or damaged, which loading
    reports.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def verify(checkpoint: Path, files: Mapping[str, list[int]], checksums: bool = True) -> None:
    """Compare size and checksum of every file with the manifest; ranks share the work.

    Args:
        checkpoint: its folder.
        files: of the manifest.
        checksums: false compares sizes only and reads no file.

    Raises:
        CheckpointError: on every rank; lists files that are missing, damaged or of another
            checkpoint.
    """

    def problems() -> list[str]:
        wrong = []
        # Dealt out in turns by size, every rank gets as much.
        for name in share(sorted(files, key=lambda name: (-files[name][0], name))):
            size, checksum = files[name]
            now = _read(checkpoint / name, checksums)
            if isinstance(now, str):
                wrong.append(f"{checkpoint / name}: {now}")
            elif now[0] != size:
                wrong.append(f"{checkpoint / name}: damaged (is {now[0]} bytes, was {size})")
            elif checksums and now[1] != checksum:
                wrong.append(
                    f"{checkpoint / name}: damaged (its checksum is not that of the manifest)"
                )
        if rank_and_world()[0] == 0:  # DeepSpeed would take them all
            there = {path.name for path in checkpoint.glob("*_states.pt")}
            for name in sorted(there - files.keys()):
                wrong.append(f"{checkpoint / name}: is of another checkpoint")
        return wrong

    TEAM.refuse(problems, f"{checkpoint} is damaged, load another one:")


def sync_files(folder: Path, own: Iterable[Path] = ()) -> dict[str, list[int]]:
    """Wait until every file in ``folder`` and the folders in it is on disk; [bytes, CRC-32] by path
    in ``folder``.

    Args:
        folder: a manifest in it is left out.
        own: files that this rank wrote and therefore reads, from its host's memory; the ranks share
            the others.

    Raises:
        CheckpointError: on every rank; lists the files that a rank could not read or bring to disk,
            and empty ones.
    """

    def listed() -> list[str]:
        paths = sorted(inner / name for inner, files in walk(folder) for name in files)
        names = [p.relative_to(folder).as_posix() for p in paths if p != folder / MANIFEST]
        if not names:
            raise CheckpointError(f"{folder}: holds no files")
        return names

    names, mine = TEAM.on_rank_0(listed, _UNFINISHABLE), {os.path.relpath(p, folder) for p in own}
    written = set().union(*gather(mine))
    mine |= set(share([name for name in names if name not in written]))
    found: dict[str, list[int]] = {}

    def problems() -> list[str]:
        wrong = []
        for name in sorted(mine):
            now = _read(folder / name, sync=True)
            if isinstance(now, str):
                wrong.append(f"{folder / name}: {now}")
            elif now[0] == 0:
                wrong.append(f"{folder / name}: is empty")
            else:
                found[name] = now
        return wrong

    TEAM.refuse(problems, f"{_UNFINISHABLE}:")
    every: dict[str, list[int]] = {}
    for part in gather(found):
        every |= part
    return dict(sorted(every.items()))


_UNFINISHABLE = "cannot finish a checkpoint"


def _read(path: Path, checksums: bool = True, sync: bool = False) -> list[int] | str:
    """[bytes, CRC-32] of a file, without ``checksums`` [bytes]; or what is wrong with it."""
    size = checksum = 0
    try:
        with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
            if not checksums:
                return [os.fstat(file.fileno()).st_size]
            synced = beside.submit(os.fsync, file.fileno()) if sync else None
            while block := file.read(1 << 24):
                size, checksum = size + len(block), zlib.crc32(block, checksum)
            if synced is not None:
                synced.result()
    except FileNotFoundError:
        return "missing"
    except OSError as problem:
        return f"cannot be {'written' if sync else 'read'} ({problem})"
    return [size, checksum]


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """A line for every value in which two nested mappings differ, by dotted key. What is absent is
    as what is None: "nothing".
    """
    old, new, found = _texts(saved), _texts(current), {}
    for key in dict.fromkeys([*old, *new]):
        given, now = old.get(key, _NOTHING), new.get(key, _NOTHING)
        if given != now:
            found[key] = f"{key}: checkpoint has {given}, this run has {now}"
    return found


_NOTHING = "nothing"


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: _NOTHING if text == "null" else text for key, text in leaves("", values)}
