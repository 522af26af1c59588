"""Which checkpoint a folder means, whichever program saved it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coat_dist.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, read_manifest
from coat_dist.checkpoint.team import KEY, say_part
from coat_dist.checkpoint.write.publish import LATEST, find, name_of, own_name, replaced_or

__all__ = ["Source", "find_source", "read_source"]

_STATES = ("*optim_states.pt", "*model_states.pt")


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert."""

    path: Path
    """Its folder, without links."""
    manifest: dict[str, Any] | None
    """What its ``manifest.json`` says; None where there is none: saved by DeepSpeed alone."""

    @property
    def of_run(self) -> bool:
        """Whether pretrain.py saved it."""
        return self.manifest is not None and "progress" in self.manifest and "run" in self.manifest

    @property
    def name(self) -> str:
        """What its conversion is called; not the folder's name where that may be a copy's."""
        if self.of_run:
            assert self.manifest is not None
            return name_of(self.manifest["progress"]["step"])
        return own_name(self.path)


def find_source(given: str) -> Source:
    """The checkpoint that ``--load`` means: that folder, or the one that its ``latest`` names.

    Raises:
        CheckpointError: there is none; names what there is.
    """
    folder = Path(given)
    if not folder.exists():  # perhaps killed while this step was saved for the second time
        folder = replaced_or(folder.absolute())
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"--load: got {given}, which {what}, accepted: a checkpoint, or a folder with `latest`")
    folder = folder.resolve()
    if _is_checkpoint(folder):
        return read_source(folder)
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        tag = ""
    if tag and (folder / tag).is_dir() and _is_checkpoint(folder / tag):
        return read_source((folder / tag).resolve())
    found = find(folder)  # of pretrain.py's: also where a kill left no `latest`
    if found is not None:
        return read_source(found)
    inside = sorted(p.name for p in folder.iterdir() if p.is_dir() and (_is_checkpoint(p) or (p / LATEST).is_file()))
    there = f"; {', '.join(inside[-5:])} in it" if inside else ""
    raise CheckpointError(
        f"--load: got {given}, which is no checkpoint and has no file `latest`, accepted: a checkpoint of DeepSpeed's "
        f"ZeRO, or a folder with `latest`{there}"
    )


def read_source(path: Path) -> Source:
    """A checkpoint and what it says of itself.

    Raises:
        CheckpointError: universal already, never finished, or a manifest that cannot be used.
    """
    manifest = _read_manifest(path) if (path / MANIFEST).is_file() else None
    if (manifest or {}).get("universal") or (path / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(f"{path}: is universal already, accepted: a checkpoint that engine.save_checkpoint wrote")
    if part := (manifest or {}).get("part"):
        raise CheckpointError(
            f"{path}: holds the files of {say_part(part)}, saved with {KEY}, accepted: a checkpoint in a folder that "
            "all nodes shared"
        )
    return Source(path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read ({problem})") from None
    if isinstance(manifest, dict) and manifest.get("format") == FORMAT and not {"progress", "run"} <= manifest.keys():
        if manifest.get("unfinished"):
            raise CheckpointError(f"{path}: was never finished, accepted: a checkpoint whose saving had ended")
        if not isinstance(manifest.get("files"), dict):
            raise CheckpointError(f"{path / MANIFEST}: is damaged, files missing or of another kind than was written")
        return manifest  # of an engine in another program
    return read_manifest(path)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(True for pattern in _STATES for _ in folder.glob(pattern))
