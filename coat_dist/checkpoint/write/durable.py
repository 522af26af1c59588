"""Atomic writes that survive a power cut: content reaches the disk before its name does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Answers of file systems that cannot sync a folder.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_text(path: Path, text: str) -> None:
    """Replace a file at once by a text in UTF-8. When this returns, its content and its name are on
    disk.

    Others may write to the folder: a link of theirs under the temporary name is removed, never
    followed.

    Raises:
        OSError: the file is what it was before, or, if only the folder could not be synced, the new
            one.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        raise named(problem, path) from problem
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno not in _NO_FOLDER_SYNC:
            raise named(problem, folder) from problem
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """:func:`sync_folder` for a folder and all folders in it."""
    for inner, _ in walk(folder):
        sync_folder(inner)


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder and all folders in it, each with the names of its files. ``os.walk`` leaves out what
    it cannot read.

    Raises:
        OSError: one of them cannot be read.
    """

    def fail(problem: OSError) -> None:
        raise problem

    for inner, _, files in os.walk(folder, onerror=fail):
        yield Path(inner), files


def make_folder(folder: Path) -> None:
    """Make a folder and those it lies in, where they are missing, and wait until they are on
    disk.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def named(problem: OSError, path: Path) -> OSError:
    """The same error with the file's name: those of open files have none."""
    if problem.filename is not None:
        return problem
    return OSError(problem.errno or errno.EIO, problem.strerror or str(problem), str(path))
