"""Ctrl-C while a program imports, which takes seconds: one line and status 130. Imports almost nothing itself."""

from __future__ import annotations

import os
import signal
from typing import Any

__all__ = ["leave_quietly", "raise_again"]


def leave_quietly(program: str) -> None:
    """From now on Ctrl-C is one line, of rank 0, and status 130, instead of a stack of imports.

    Where SIGINT is ignored (a background job of a shell), it stays ignored.
    """

    def leave(number: int, frame: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"{program}: interrupted before it had begun\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def raise_again() -> None:
    """From now on Ctrl-C is a ``KeyboardInterrupt`` again: the program cleans up and reports what it leaves."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
