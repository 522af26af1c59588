"""Where a universal checkpoint is written: which folders are refused, and how it is published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from coat_dist.checkpoint.write.durable import write_text
from coat_dist.checkpoint.write.lock import locked_folder
from coat_dist.checkpoint.write.publish import finish, finished, publish, retire, unfinished
from launch.outputs import checkpoint_at
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

    def check(self, source: Source, identity: Mapping[str, Any]) -> None:
        """Refuse a place in which something would be lost or mixed up.

        Raises:
            CheckpointError: names the option and why.
        """
        folder = self.final if self.exact else self.final.parent

        def refuse(what: str) -> None:
            raise CheckpointError(f"{self.option}: got {folder}, {what}, accepted: another folder")

        if folder.is_relative_to(source.path) or checkpoint_at(self.final.parent) is not None:
            refuse("which is a checkpoint or in one")  # a run removes its old ones, with all that is in them
        earlier = _earlier(self.final)
        another = earlier is None or {key: earlier.get(key) for key in identity} != identity
        if self.exact:
            if another and self.final.exists() and not _is_empty(self.final):
                refuse("which is there already and no earlier conversion of this checkpoint")
            return
        if folder == source.path.parent:
            refuse("where the source is")
        for there in finished(folder):
            if not read_manifest(there).get("universal"):
                refuse(f"which holds a run's own checkpoint, {there.name}")
        if another and (self.final / MANIFEST).is_file():
            refuse(f"which holds another run's {self.final.name}")

    @contextmanager
    def locked(self) -> Iterator[Path]:
        """Keep other conversions out, and give an empty folder to write into; without :meth:`publish` nothing is left.

        A run that saves beside an exact folder has another lock.
        """
        parent, there = self.final.parent, self.final.parent.exists()
        guard = parent / f".converting-{self.final.name}" if self.exact else parent
        with ExitStack() as held:
            if not there:
                held.callback(_remove_if_empty, parent)
            if self.exact:
                held.callback(_remove_if_empty, guard)
            held.enter_context(locked_folder(guard, self.option, CheckpointError))
            temporary = unfinished(self.final)
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            yield temporary

    def publish(self, manifest: Mapping[str, Any]) -> list[str]:
        """Give what was written, and is on disk, its name; an earlier conversion is removed afterwards.

        Returns:
            Warnings: what is left and could not be removed.
        """
        folder, temporary = self.final.parent, unfinished(self.final)
        if not self.exact:
            publish(temporary, self.final, manifest)
            write_text(folder / LATEST_UNIVERSAL, self.final.name)
            return retire(folder, self.final)
        if self.final.exists() and _is_empty(self.final):
            self.final.rmdir()
        finish(temporary, self.final, manifest)
        write_text(folder / LATEST_UNIVERSAL, self.final.name)
        replaced = temporary.with_name(f".unfinished-replaced-{self.final.name}")  # where `finish` puts it
        shutil.rmtree(replaced, ignore_errors=True)
        return [f"{replaced} could not be removed"] if replaced.exists() else []


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _earlier(folder: Path) -> dict[str, Any] | None:
    """The manifest of an earlier conversion; None where there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("universal") else None


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
