"""A program under guard: nothing that it started is left when it ends, or is cut, or when who started it ends.

    python -m benchmarks.guard PATIENCE PROGRAM ARGUMENT ...          # started by :func:`start`, never by hand

The guard's standard input is a pipe whose other end only the starter has. Where it closes, the starter asks for the
end, or is no more, also where SIGKILL has left it no time to say so: then the guard ends the program and all that it
started. Processes whose parent has ended become the guard's (PR_SET_CHILD_SUBREAPER), so that it also finds ranks,
which are in sessions of their own. A signal at the starter's death (PR_SET_PDEATHSIG) would reach a single process.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["start"]

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 15.0
"""Seconds that all have to end after SIGTERM: launchers end their ranks when they are asked to."""
KILLED = 5.0
"""Those that they have after SIGKILL."""
PR_SET_CHILD_SUBREAPER = 36
STEP = 0.05
"""Seconds between two looks."""


def start(words: Sequence[str], seconds: float, stopped: Callable[[], bool] = lambda: False) -> object:
    """Run a command for so long at most, or until ``stopped``; its exit status, or words. Nothing that it started is
    left behind: GPUs that are still busy would spoil what is measured next."""
    line, end = [sys.executable, "-m", "benchmarks.guard", str(PATIENCE), *words], time.monotonic() + seconds
    with subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            while (status := guard.poll()) is None and not stopped() and time.monotonic() < end:
                time.sleep(STEP)
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                guard.wait(PATIENCE + 2 * KILLED)
            with suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
    return "time was over" if status is None else status


def main() -> int:
    """Run the program; its exit status, or 128 and its signal."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen([sys.executable, *sys.argv[2:]], stdin=subprocess.DEVNULL)
    while program.poll() is None and not told:
        if select.select([0], [], [], STEP)[0]:  # nobody writes: it is the end
            break
    os.killpg(0, signal.SIGTERM)
    _none_is_left(program, float(sys.argv[1]), lambda _: None)
    _none_is_left(program, KILLED, psutil.Process.kill)
    status = program.wait()
    return status if status >= 0 else 128 - status


def _none_is_left(program: subprocess.Popen, patience: float, act: Callable[[psutil.Process], object]) -> None:
    """Wait until all below this process have ended, and do something to those that have not."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if program.poll() is not None:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # those that became this one's
                    pass
        if not (left := psutil.Process().children(recursive=True)):
            return
        for one in left:
            with suppress(psutil.NoSuchProcess):
                act(one)
        time.sleep(STEP)


if __name__ == "__main__":
    sys.exit(main())
