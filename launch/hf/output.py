"""Where a conversion is written: what is refused, and how it gets its name when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from coat_dist.checkpoint.manifest import FORMAT, MANIFEST, CheckpointError, sync_files
from coat_dist.checkpoint.write.durable import make_folder, sync_folder, sync_tree, write_text
from coat_dist.checkpoint.write.lock import locked_folder
from coat_dist.checkpoint.write.publish import unfinished
from launch.hf.folder import CONFIG, travelling_files
from launch.outputs import checkpoint_at, lack_of_room
from launch.weights.converted import MODEL
from launch.weights.source import CARRIED
from launch.weights.write import Written

__all__ = ["Output", "not_replaceable"]


class Output:
    """The folder that a conversion becomes.

    Args:
        option: of the command line, for errors.
        final: the folder.
        overwrite: an earlier conversion, or any Hugging Face folder, may be replaced, if nothing else is in it.
    """

    def __init__(self, option: str, final: Path, overwrite: bool) -> None:
        # Where links lead to: a link would be replaced by a folder, and what it leads to would stay.
        self.option, self.final, self.overwrite = option, Path(os.path.realpath(final)), overwrite

    def check(self, source: Path, needed: int) -> None:
        """Refuse a place where something would be lost, or that has no room.

        Args:
            source: folder that is read.
            needed: bytes that will be written.

        Raises:
            CheckpointError: names the option and why.
        """
        final, source = self.final, source.resolve()
        if final == source or final.is_relative_to(source) or source.is_relative_to(final):
            self._refuse("which is, or is in, or holds what is converted")
        if (outer := checkpoint_at(final.parent)) is not None:  # its run would remove both
            self._refuse(f"which is in the checkpoint {outer}")
        if final.exists() and not final.is_dir():
            self._refuse("which is no folder")
        if final.is_dir() and any(path.name != ".lock" for path in final.iterdir()):
            if not self.overwrite:
                self._refuse("which is there already and not empty", "another folder, or --overwrite")
            if (other := not_replaceable(final)) is not None:
                self._refuse(f"which holds something else than a model ({other}): --overwrite does not remove it")
        above = next(parent for parent in final.parents if parent.exists())
        if not above.is_dir():
            self._refuse(f"and {above} is no folder")
        if (lack := lack_of_room(above, needed)) is not None:
            self._refuse(lack, "a larger disk")

    def _refuse(self, what: str, accepted: str = "another folder") -> None:
        raise CheckpointError(f"{self.option}: got {self.final}, {what}, accepted: {accepted}")

    def write(self, source: Path, needed: int, write: Callable[[Path], Written], manifest: Mapping[str, Any]) -> None:
        """Let ``write`` fill a folder of another name, and give it its own when all of it is on disk.

        After an error nothing is left; after a kill at most folders whose names start with ``.unfinished-`` and
        ``.converting-``, which the next conversion to the same place removes.

        Raises:
            CheckpointError: a file cannot be written; what was there before is untouched.
        """
        final = self.final
        guard = final.with_name(f".converting-{final.name}")
        with ExitStack() as held:
            held.callback(_remove_if_empty, guard)
            make_folder(final.parent)
            held.enter_context(locked_folder(guard, self.option, CheckpointError))
            self.check(source, needed)  # again: another program may have written until the lock was ours
            temporary = unfinished(final)
            try:
                if temporary.exists():
                    shutil.rmtree(temporary)
                temporary.mkdir()
                held.callback(shutil.rmtree, temporary, ignore_errors=True)  # after an error; else it is gone
                written = write(temporary)
                files = sync_files(temporary, written.files)
                content = {"format": FORMAT, **manifest, "files": files, "tensors": written.tensors}
                write_text(temporary / MANIFEST, json.dumps(content, indent=1))
                sync_tree(temporary)
                self._publish(temporary)
            except OSError as problem:
                raise CheckpointError(f"{self.option}: cannot write {final}: {problem}") from problem

    def _publish(self, temporary: Path) -> None:
        replaced = self.final.with_name(f".unfinished-replaced-{self.final.name}")
        there = self.final.exists()
        if there and replaced.exists():  # else a kill left it as the last one of its name
            shutil.rmtree(replaced)
        try:
            if there:
                os.rename(self.final, replaced)
            os.rename(temporary, self.final)
            sync_folder(self.final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException as problem:
            if temporary.exists():
                with suppress(OSError):
                    os.rename(replaced, self.final)
            elif isinstance(problem, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{self.final} is complete") from None
            raise


def not_replaceable(folder: Path) -> str | None:
    """What is in a folder beside an earlier conversion or a model of Hugging Face's; None where there is nothing else.

    A trainer's checkpoints and somebody's notes lie in such folders too.
    """
    there = sorted(
        path for path in folder.rglob("*") if path.name != ".lock" and (path.is_symlink() or not path.is_dir())
    )
    model = {MANIFEST, MODEL, CONFIG, *travelling_files(folder)}
    names = [path.relative_to(folder).as_posix() for path in there]
    converted = MODEL in names
    for name in names:
        top, _, rest = name.partition("/")
        if name in model or (converted and top == CARRIED):
            continue
        if rest or not name.endswith((".safetensors", ".safetensors.index.json")):
            return name
    return None if not names or {MODEL, CONFIG} & set(names) else names[0]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
