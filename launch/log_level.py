"""How much a program says: ``--log-level``, for its own lines and for libraries' loggers, the same in all programs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from typing import TextIO

__all__ = ["LEVELS", "SlowPhase", "add_log_level", "quiet_libraries", "say", "set_log_level", "shows"]

LEVELS = ("debug", "info", "warning", "error")
_LIBRARIES = ("DeepSpeed", "megatron", "torch.distributed", "transformers", "matplotlib")
_level = "info"


def add_log_level(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--log-level`` to a command line; give what was chosen to :func:`set_log_level`."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="debug: also what DeepSpeed's, Megatron's and torch's loggers say; info: this program's lines, and "
        "libraries' warnings; warning: warnings and errors only; error: errors only",
    )


def set_log_level(level: str) -> None:
    """Choose how much this process says, from here on."""
    global _level
    if level not in LEVELS:
        raise ValueError(f"level: got {level!r}, accepted: {', '.join(LEVELS)}")
    _level = level
    quiet_libraries()


def quiet_libraries() -> None:
    """Give the libraries' loggers the level that was chosen. Call it again after an import that makes a logger anew.

    Where nothing was chosen they say warnings and errors.
    """
    wanted = {"debug": logging.DEBUG, "error": logging.ERROR}.get(_level, logging.WARNING)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(wanted)
    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setLevel(wanted)
    if _level == "debug" and not logging.getLogger().handlers:  # Megatron's logger has no handler of its own
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")


def shows(level: str) -> bool:
    """Whether lines of this level are to be printed."""
    return LEVELS.index(level) >= LEVELS.index(_level)


def say(text: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Print a line of the program's own, on rank 0, if the chosen level shows it.

    Args:
        level: ``"info"`` goes to stdout, ``"warning"`` and above to stderr.
        stream: goes there instead.
    """
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))  # SLURM's, until RANK is set from it
    if shows(level) and rank == "0":
        print(text, file=stream or (sys.stdout if level in ("debug", "info") else sys.stderr), flush=True)


class SlowPhase(threading.Timer):
    """A phase of a start, until ``cancel()`` or the end of ``with``: after ``seconds`` rank 0 says it on stderr."""

    def __init__(self, doing: str, seconds: float = 5.0) -> None:
        super().__init__(seconds, lambda: say(f"{doing} ...", stream=sys.stderr))
        self.daemon = True  # a program that fails meanwhile ends at once
        self.start()

    def __enter__(self) -> SlowPhase:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
