"""Where Python is while a program runs: samples from a thread, for ``step.py``."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["Sampler"]


class Sampler:
    """Looks where Python is, from a thread, while a ``with`` block runs: lines, and functions with
    what they call.

    A thread that waits in a lock, a socket or autograd's engine does nothing of its own and is left
    out.
    """

    IDLE = {"wait", "_engine_run_backward", "select", "accept", "poll", "recvfrom", "run", "_recv"}
    QUIET = (
        "threading.py",
        "selectors.py",
        "heartbeat.py",
        "queue.py",
        "compile_worker/subproc_pool.py",
        "compile_worker/timer.py",
    )

    def __init__(self, pause: float = 4e-4) -> None:
        self.pause, self.samples, self.looks = pause, 0, 0
        self.lines, self.functions = Counter[str](), Counter[str]()
        self._ended = threading.Event()

    def __enter__(self) -> Sampler:
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(5e-5)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def _look(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(self.pause):
            self.looks += 1
            for thread, frame in sys._current_frames().items():
                code = frame.f_code
                if (
                    thread == own
                    or code.co_name in self.IDLE
                    or code.co_filename.endswith(self.QUIET)
                ):
                    continue
                self.samples += 1
                self.lines[f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"] += 1
                self.functions.update(
                    {
                        f"{_short(f.f_code.co_filename)} {f.f_code.co_qualname}"
                        for f in _stack(frame)
                    }
                )


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])


def _stack(frame: Any) -> list[Any]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
