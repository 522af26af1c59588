"""What ends a program from outside and needs no stack: Ctrl-C while it imports, which takes seconds, and a reader of
its output that leaves (``| head``). Imports next to nothing itself."""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
from typing import Any

__all__ = ["leave_quietly", "outlive_readers", "raise_again"]


def leave_quietly(program: str) -> None:
    """From now on Ctrl-C is one line, of rank 0, and status 130, where it would have been a stack of imports.

    Where SIGINT is ignored (a background job of a shell), it stays ignored. Every program begins with this, so
    :func:`outlive_readers` is called here, too.

    Args:
        program: its name, for the line.
    """

    def leave(number: int, frame: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"{program}: interrupted before it had begun\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    outlive_readers()


def raise_again() -> None:
    """From now on Ctrl-C is a ``KeyboardInterrupt``, as it was: the program cleans up and says what it leaves."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def outlive_readers() -> None:
    """From now on lines to a pipe that nobody reads any more are dropped; the program does its work to the end.

    ``SIGPIPE`` would end it without a word, also for a socket of another rank, and steps, or a file, would be lost.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Pipe(io.FileIO):
    """The writing end of a pipe; once its readers are gone, a way to nowhere."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for what libraries and other processes write there
            os.close(nowhere)
            return len(data)


def _outliving(stream: Any) -> Any:
    """``stream``, or one like it where it is a pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return stream
    except (AttributeError, OSError, ValueError):  # closed, or none
        return stream
    stream.flush()
    raw = _Pipe(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
