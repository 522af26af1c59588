"""File locks, so that one program at a time writes to a folder; the system drops them when their
process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from coat_dist.checkpoint.write.durable import make_folder

LOCK = ".lock"
"""Name of the file in a folder of checkpoints or metrics; several programs look for it."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Error numbers of a file system that has no locks."""


@contextlib.contextmanager
def locked_folder(folder: Path, option: str, error: type[Exception]) -> Iterator[None]:
    """Make a folder where it is not there, and keep other programs that ask for the same lock out
    of it.

    Args:
        folder: to be written to; the lock is the file ``LOCK`` in it.
        option: of the command line that named the folder, for the error.
        error: raised where another program holds the lock, or the folder cannot be written. A file
            system without locks is a warning on stderr.
    """
    with contextlib.ExitStack() as held:
        try:
            make_folder(folder)
            held.enter_context(locked(folder / LOCK))
        except BlockingIOError:
            raise error(
                f"{option}: got {folder}, which another program is writing to, accepted: another "
                "folder, or to wait"
            ) from None
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise error(
                    f"{option}: got {folder}, accepted: a folder to write to ({problem})"
                ) from problem
            print(
                f"warning: {folder} is on a file system without locks: do not let a second program "
                "write into it",
                file=sys.stderr,
                flush=True,
            )
        yield


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file ``path``, which is made here and removed afterwards.

    A record lock: it belongs to this process alone, children do not inherit it, and it reaches
    other hosts over NFS. Do not take it twice in one process: the system allows that, and leaving
    one would drop both.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be made, or its file system has no locks.
    """
    descriptor = _take(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _take(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except OSError as problem:
            os.close(descriptor)
            if problem.errno in (errno.EACCES, errno.EAGAIN):  # POSIX leaves open which
                raise BlockingIOError(
                    errno.EAGAIN, "another process holds the lock", str(path)
                ) from None
            raise
        os.close(descriptor)  # its holder removed it in the meantime: what is locked has no name
