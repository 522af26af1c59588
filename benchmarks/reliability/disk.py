"""Faults of a disk and kills at one call, by the library ``faults.c``, which is compiled and loaded before libc."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

__all__ = [
    "KILL_BEFORE",
    "KILL_INSIDE",
    "LOG",
    "NO_SPACE",
    "NO_SYNC",
    "READ_ONLY",
    "STOP_BEFORE",
    "arm",
    "compile_library",
    "disarm",
]

# The numbers of `faults.c`.
LOG, KILL_BEFORE, KILL_INSIDE, STOP_BEFORE, NO_SPACE, READ_ONLY, NO_SYNC = range(1, 8)


def compile_library(folder: Path) -> Path | None:
    """``faults.c`` as a shared library in ``folder``, for ``LD_PRELOAD``; None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        return None
    library = folder / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def arm(folder: str, kind: int, at: int, log: Path) -> None:
    """From now on count what this process changes below ``folder``, with a line each in ``log``.

    At event ``at`` (the first is 1) the fault ``kind`` happens; a full or read-only disk stays so afterwards.
    """
    ctypes.CDLL(None).faults_arm(os.fsencode(folder), kind, ctypes.c_long(at), os.fsencode(log))


def disarm() -> None:
    """No more faults."""
    ctypes.CDLL(None).faults_disarm()
