"""Which checkpoint ``to_universal.py`` converts, whichever program saved it, and where the
result goes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coat_dist.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from coat_dist.checkpoint.write import publish as tags
from coat_dist.checkpoint.write.durable import write_text
from launch.common.lock import locked_folder
from launch.convert.checkpoint_weights import find_checkpoint
from launch.convert.output_folder import checkpoint_at

LATEST_UNIVERSAL = "latest_universal"
"""Where DeepSpeed looks for the name of a universal checkpoint."""


class Source:
    """A checkpoint to convert.

    Args:
        path: its folder, without links.

    Raises:
        CheckpointError: universal already, never finished, or a manifest that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path, of_run=False) if (path / MANIFEST).is_file() else {}
        """Empty where DeepSpeed alone saved it."""
        self.of_run = {"progress", "run"} <= self.manifest.keys()
        """Whether pretrain.py saved it."""
        if self.manifest.get("universal") or (path / "zero" / "optimizer_state.pt").is_file():
            raise CheckpointError(
                f"{path}: is universal already, accepted: what engine.save_checkpoint wrote"
            )

    @property
    def name(self) -> str:
        """Name of its conversion; of a run by the step, because the folder may be a copy."""
        if self.of_run:
            return tags.name_of(self.manifest["progress"]["step"])
        return tags.own_name(self.path)

    def identity(self) -> dict[str, Any]:
        """What distinguishes it from another checkpoint of the same step."""
        if self.of_run:
            return {key: self.manifest[key] for key in ("run", "progress")}
        step = 0
        for path in sorted(self.path.glob("*model_states.pt"))[:1]:
            with suppress(Exception):  # the conversion names damaged files
                step = int(
                    torch.load(path, map_location="cpu", weights_only=False, mmap=True)[
                        "global_steps"
                    ]
                )
        return {"progress": {"step": step}, "run": {}, "source": str(self.path)}


def find_source(given: str) -> Source:
    """The checkpoint that ``--load`` means: that folder, or the one that its ``latest`` names.

    Raises:
        CheckpointError: there is none.
    """
    found = find_checkpoint(Path(given))
    if found is None:
        raise CheckpointError(
            f"--load: got {given}, which is no checkpoint and has no file `latest`, accepted: a "
            "checkpoint of "
            "DeepSpeed's ZeRO, or a folder with `latest`"
        )
    return Source(found)


@dataclass(frozen=True)
class UniversalOutput:
    """The place of one conversion."""

    option: str
    """Of the command line, for errors."""
    final: Path
    """The folder that becomes the universal checkpoint."""
    exact: bool
    """``final`` was named itself (``--output_folder``), so its folder may hold anything;
    ``--output`` is for universal checkpoints alone, and gets ``latest`` too.
    """

    def check(self, source: Source, identity: Mapping[str, Any]) -> None:
        """Refuse a place in which something would be lost or mixed up.

        Raises:
            CheckpointError: names the option and why.
        """
        folder = self.final if self.exact else self.final.parent

        def refuse(what: str) -> None:
            raise CheckpointError(f"{self.option}: got {folder}, {what}, accepted: another folder")

        if folder.is_relative_to(source.path) or checkpoint_at(self.final.parent) is not None:
            # A run removes its old ones, with all that is in them.
            refuse("which is a checkpoint or in one")
        earlier = _earlier(self.final)
        another = earlier is None or {key: earlier.get(key) for key in identity} != identity
        if self.exact:
            if another and self.final.exists() and not _is_empty(self.final):
                refuse("which is there already and no earlier conversion of this checkpoint")
            return
        if folder == source.path.parent:
            refuse("where the source is")
        for there in tags.finished(folder):
            if not read_manifest(there).get("universal"):
                refuse(f"which holds a run's own checkpoint, {there.name}")
        if another and (self.final / MANIFEST).is_file():
            refuse(f"which holds another run's {self.final.name}")

    @contextmanager
    def locked(self) -> Iterator[Path]:
        """Keep other conversions out, and give a new folder to write into; without :meth:`publish`
        nothing is left.

        A run that saves beside an exact folder has another lock.
        """
        parent = self.final.parent
        guard = parent / f".converting-{self.final.name}" if self.exact else parent
        with ExitStack() as held:
            if not parent.exists():
                held.callback(_remove_if_empty, parent)
            if self.exact:
                held.callback(_remove_if_empty, guard)
            held.enter_context(locked_folder(guard, self.option, CheckpointError))
            temporary = tags.unfinished(self.final)
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            yield temporary

    def publish(self, manifest: Mapping[str, Any]) -> list[str]:
        """Give what was written, and is on disk, its name; an earlier conversion is removed
        afterwards.

        Returns:
            Warnings: what is left and could not be removed.
        """
        folder, temporary = self.final.parent, tags.unfinished(self.final)
        if self.exact and _is_empty(self.final):
            self.final.rmdir()
        tags.finish(temporary, self.final, manifest)
        for name in (LATEST_UNIVERSAL,) if self.exact else (tags.LATEST, LATEST_UNIVERSAL):
            write_text(folder / name, self.final.name)
        if not self.exact:
            return tags.retire(folder, self.final)
        # Where `finish` puts it.
        replaced = temporary.with_name(f".unfinished-replaced-{self.final.name}")
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
