"""Which checkpoint a folder means, whichever program saved it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
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
    """Content of its ``manifest.json``; None where there is none: saved by DeepSpeed alone."""

    @property
    def of_run(self) -> bool:
        """Whether pretrain.py saved it."""
        return self.manifest is not None and {"progress", "run"} <= self.manifest.keys()

    @property
    def name(self) -> str:
        """Name of its conversion; of a run by the step, because the folder may be a copy."""
        if self.of_run:
            assert self.manifest is not None
            return name_of(self.manifest["progress"]["step"])
        return own_name(self.path)

    def identity(self) -> dict[str, Any]:
        """What distinguishes it from another checkpoint of the same step."""
        if self.of_run:
            assert self.manifest is not None
            return {key: self.manifest[key] for key in ("run", "progress")}
        return {"progress": {"step": self._global_step()}, "run": {}, "source": str(self.path)}

    def _global_step(self) -> int:
        for path in sorted(self.path.glob("*model_states.pt")):
            with suppress(Exception):  # the conversion names damaged files
                return int(torch.load(path, map_location="cpu", weights_only=False, mmap=True)["global_steps"])
        return 0


def find_source(given: str) -> Source:
    """The checkpoint that ``--load`` means: that folder, or the one that its ``latest`` names.

    Raises:
        CheckpointError: there is none.
    """
    folder = replaced_or(Path(given).absolute()).resolve()  # of a run that was killed while it saved this step again
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        tag = ""
    for path in (folder, folder / tag):
        if _is_checkpoint(path):
            return read_source(path.resolve())
    found = find(folder)  # of pretrain.py: a kill may have left no `latest`
    if found is None:
        raise CheckpointError(
            f"--load: got {given}, which is no checkpoint and has no file `latest`, accepted: a checkpoint of "
            "DeepSpeed's ZeRO, or a folder with `latest`"
        )
    return read_source(found)


def read_source(path: Path) -> Source:
    """A checkpoint with its manifest.

    Raises:
        CheckpointError: universal already, never finished, or a manifest that cannot be used.
    """
    manifest = read_manifest(path, of_run=False) if (path / MANIFEST).is_file() else None
    if (manifest or {}).get("universal") or (path / "zero" / "optimizer_state.pt").is_file():
        raise CheckpointError(f"{path}: is universal already, accepted: a checkpoint that engine.save_checkpoint wrote")
    if part := (manifest or {}).get("part"):
        raise CheckpointError(
            f"{path}: holds the files of {say_part(part)}, saved with {KEY}, accepted: a checkpoint in a folder that "
            "all nodes shared"
        )
    return Source(path, manifest)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(True for pattern in _STATES for _ in folder.glob(pattern))
