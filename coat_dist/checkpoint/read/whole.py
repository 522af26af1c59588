"""Whether the files of a checkpoint are whole: by its manifest, or as far as the files themselves tell."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from ...ranks import raise_everywhere, rank_and_world
from ..manifest import MANIFEST, read_manifest, verify
from ..team import CheckpointError, Team, check_one_save, wrong_part

__all__ = ["check_whole"]


def check_whole(folder: Path, team: Team, checksums: bool = True) -> None:
    """Refuse a checkpoint with missing, damaged or foreign files, before anything of it is loaded; collective.

    One without a manifest, of plain DeepSpeed or older code, is taken with a note on rank 0; there, only files that are
    empty, cut off or no files of torch's can be told.

    Args:
        folder: of the checkpoint.
        team: the ranks that have it before them.
        checksums: of files that a manifest lists; else only sizes are compared.

    Raises:
        CheckpointError: on every rank; names the files.
    """

    def read() -> dict[str, Any] | None:
        if not (folder / MANIFEST).exists():
            return None
        manifest = read_manifest(folder, of_run=False)
        if wrong := wrong_part(folder, manifest, team):
            raise CheckpointError(wrong)
        return manifest

    manifest = team.ask_leader(read)
    check_one_save(folder, manifest, team)
    if manifest is not None:
        verify(folder, manifest["files"], team, checksums)
        return
    names = team.ask_leader(lambda: sorted(p.name for p in folder.glob("*.pt")))
    try:
        raise_everywhere(lambda: [line for name in team.share(names) for line in _unreadable(folder / name)])
    except ValueError as problem:
        raise CheckpointError(str(problem)) from None
    if rank_and_world()[0] == 0:
        print(f"note: {folder} has no {MANIFEST}: it is loaded unverified", file=sys.stderr, flush=True)


def _unreadable(path: Path) -> list[str]:
    try:
        if not path.stat().st_size:
            return [f"{path}: is empty"]
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped:  # the list of contents is at its end
            with zipfile.ZipFile(path) as contents:
                contents.infolist()
        else:  # the older format has none: it must be read
            torch.load(path, map_location="cpu", weights_only=False)
    except Exception as problem:  # of damaged bytes, unpickling may raise anything
        return [f"{path}: is damaged or cut off ({type(problem).__name__}: {problem})"]
    return []
