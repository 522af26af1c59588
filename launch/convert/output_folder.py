"""The folder that a conversion writes: what it does not replace, and how it gets its name when
it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_dist.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, sync_files
from coat_dist.checkpoint.read.tags import is_checkpoint
from coat_dist.checkpoint.write.durable import make_folder, sync_tree, write_text
from coat_dist.checkpoint.write.publish import put_in_place, unfinished
from launch.convert.hugging_face import CONFIG, travelling_files


def checkpoint_at(folder: Path) -> Path | None:
    """The checkpoint that a folder is or lies in; None where there is none. Its run may remove it,
    with all in it.

    Args:
        folder: need not exist; absolute, and without links, which would hide what it lies in.
    """
    return next(filter(is_checkpoint, (folder, *folder.parents)), None)


class OutputFolder:
    """The folder that a conversion becomes.

    Args:
        option: of the command line, for errors.
        final: the folder.
        overwrite: an earlier conversion, or any Hugging Face folder, may be replaced, if nothing
            else is in it.
    """

    def __init__(self, option: str, final: Path, overwrite: bool) -> None:
        # Where links lead to: a link would be replaced by a folder, and what it leads to would
        # stay.
        self.option, self.final, self.overwrite = option, Path(os.path.realpath(final)), overwrite

    def check(self, source: Path, needed: int) -> None:
        """Refuse a place where something would be lost, or that has no room.

        Args:
            source: folder that is read.
            needed: bytes that will be written.

        Raises:
            CheckpointError: names the option and why.
        """
        final, source, why, accepted = self.final, source.resolve(), None, "another folder"
        if final.is_relative_to(source) or source.is_relative_to(final):
            why = "which is, or is in, or holds what is converted"
        elif (outer := checkpoint_at(final.parent)) is not None:
            why = f"which is in the checkpoint {outer}, and its run may remove both"
        elif final.exists() and not (
            final.is_dir() and (self.overwrite or not any(final.iterdir()))
        ):
            why, accepted = "which is there already and not empty", "another folder, or --overwrite"
        elif (other := _not_replaceable(final)) is not None:
            why = (
                f"which holds something else than a model ({other}): --overwrite does not remove it"
            )
        elif (free := _free(final)) < needed:
            why = f"where {free:,} bytes are free and {needed:,} are needed"
            accepted = "a larger disk"
        if why is not None:
            raise CheckpointError(f"{self.option}: got {final}, {why}, accepted: {accepted}")

    def write(self, write: Callable[[Path], object], manifest: Mapping[str, Any]) -> None:
        """Let ``write`` fill a folder of another name, and give it its own when all of it is on
        disk.

        After an error nothing is left; after a kill at most folders whose names start with
        ``.unfinished-``, which the next conversion to the same place removes.

        Raises:
            CheckpointError: a file cannot be written; what was there before is untouched.
        """
        temporary = unfinished(self.final)
        try:
            make_folder(self.final.parent)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
            write(temporary)
            content = {"format": FORMAT, **manifest, "files": sync_files(temporary)}
            write_text(temporary / MANIFEST, json.dumps(content, indent=1))
            sync_tree(temporary)
            replaced = self.final.with_name(f".unfinished-replaced-{self.final.name}")
            if replaces := self.overwrite and self.final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            put_in_place(temporary, self.final, replaced if replaces else None)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as problem:
            raise CheckpointError(
                f"{self.option}: cannot write {self.final}: {problem}"
            ) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an error; else it has its name


def _free(folder: Path) -> int:
    """Bytes that are free where a folder will be."""
    return shutil.disk_usage(next(one for one in folder.parents if one.exists())).free


def _not_replaceable(folder: Path) -> str | None:
    """A file in a folder that does not belong to a model of Hugging Face's; None where there is
    none. Checkpoints of a trainer and somebody's notes lie in such folders too.
    """
    model = {MANIFEST, CONFIG, *travelling_files(folder)}
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            names.append(path.relative_to(folder).as_posix())
    for name in names:
        tensors = "/" not in name and name.endswith((".safetensors", ".safetensors.index.json"))
        if not tensors and name not in model:
            return name
    return names[0] if names and CONFIG not in names else None
