"""Where a universal checkpoint is written: which folders are refused, and how it gets its name when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from coat_dist.checkpoint.write.durable import sync_folder, sync_tree, write_text
from coat_dist.checkpoint.write.publish import finished, publish, retire, unfinished
from launch.outputs import checkpoint_at, lack_of_room
from launch.universal.source import Source

__all__ = ["LATEST_UNIVERSAL", "Output"]

LATEST_UNIVERSAL = "latest_universal"
"""Where DeepSpeed looks for the name of a universal checkpoint."""


@dataclass(frozen=True)
class Output:
    """The place of one conversion."""

    option: str
    """Of the command line, for errors."""
    final: Path
    """The folder that becomes the universal checkpoint."""
    exact: bool
    """``final`` was named itself (``--output_folder``), so its folder may hold anything; ``--output`` is for
    universal checkpoints alone, and gets ``latest`` too."""

    @property
    def temporary(self) -> Path:
        """Where it is written."""
        return unfinished(self.final)

    def check(self, source: Source, identity: Mapping[str, Any], needed: int) -> None:
        """Refuse a place in which something would be lost or mixed up, or that has no room.

        Args:
            source: what is converted.
            identity: what the new manifest will say of its origin.
            needed: bytes that will be written; an earlier conversion keeps its own until then.

        Raises:
            CheckpointError: names the option and why.
        """
        folder = self.final if self.exact else self.final.parent

        def refuse(what: str, accepted: str = "another folder") -> None:
            raise CheckpointError(f"{self.option}: got {folder}, {what}, accepted: {accepted}")

        if folder.is_relative_to(source.path) or checkpoint_at(self.final.parent) is not None:
            refuse("which is a checkpoint or in one")  # a run removes its old ones, with all that is in them
        if self.exact:
            empty = not self.final.exists() or (self.final.is_dir() and not any(self.final.iterdir()))
            if not empty and _origin(self.final, identity) != identity:
                refuse("which is there already and no earlier conversion of this checkpoint")
        else:
            if folder == source.path.parent:
                refuse("where the source is")
            for there in finished(folder):
                if not read_manifest(there).get("universal"):
                    refuse(f"which holds a run's own checkpoint, {there.name}")
            if (self.final / MANIFEST).is_file() and _origin(self.final, identity) != identity:
                refuse(f"which holds another run's {self.final.name}")
        if (lack := lack_of_room(folder, needed)) is not None:
            refuse(lack, "a larger disk")

    def publish(self, manifest: Mapping[str, Any]) -> list[str]:
        """Give what was written, and is on disk, its name; an earlier conversion makes room.

        Returns:
            Warnings: what is left and could not be removed.
        """
        folder = self.final.parent
        if not self.exact:
            publish(self.temporary, self.final, manifest)
            write_text(folder / LATEST_UNIVERSAL, self.final.name)
            return retire(folder, self.final)
        write_text(self.temporary / MANIFEST, json.dumps(manifest, indent=1))
        sync_tree(self.temporary)
        replaced = self.temporary.with_name(f".unfinished-replaced-{self.final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.final.exists():
            os.rename(self.final, replaced)
        try:
            os.rename(self.temporary, self.final)
        except OSError:
            with suppress(OSError):
                os.rename(replaced, self.final)
            raise
        sync_folder(folder)
        write_text(folder / LATEST_UNIVERSAL, self.final.name)
        shutil.rmtree(replaced, ignore_errors=True)
        return [f"{replaced} could not be removed"] if replaced.exists() else []


def _origin(there: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the manifest of an earlier conversion says of its origin; None where it is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        manifest = json.loads((there / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as problem:
        raise CheckpointError(f"{there / MANIFEST}: cannot be read ({problem})") from problem
    if not isinstance(manifest, dict) or not manifest.get("universal"):
        return None
    return {key: manifest.get(key) for key in identity}
