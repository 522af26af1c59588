"""``--log-level`` of all programs, for their own lines and for libraries' loggers."""

from __future__ import annotations

import argparse
import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")
_LIBRARIES = ("DeepSpeed", "megatron", "torch.distributed", "transformers", "matplotlib")
_level = "info"


LEVEL_HELP = (
    "debug: also what DeepSpeed's, Megatron's and torch's loggers say; info: this program's lines, "
    "and libraries' warnings; warning: warnings and errors only; error: errors only"
)


def add_log_level(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--log-level`` to a command line; its value goes to :func:`set_log_level`."""
    parser.add_argument("--log-level", choices=LEVELS, default="info", help=LEVEL_HELP)


def set_log_level(level: str) -> None:
    """Set the level of this process."""
    global _level
    _level = level
    quiet_libraries()


def quiet_libraries() -> None:
    """Set the level of libraries' loggers; call it again after an import that creates one."""
    wanted = {"debug": logging.DEBUG, "error": logging.ERROR}.get(_level, logging.WARNING)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(wanted)
    for handler in logging.getLogger("DeepSpeed").handlers:
        handler.setLevel(wanted)
    # Megatron's logger has no handler of its own.
    if _level == "debug" and not logging.getLogger().handlers:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")


def shows(level: str) -> bool:
    """Whether lines of this level are to be printed."""
    return LEVELS.index(level) >= LEVELS.index(_level)


def say(text: str, level: str = "info") -> None:
    """Print a line on rank 0, if the level shows it: "info" to stdout, "warning" and above to
    stderr.
    """
    # SLURM's, until RANK is set from it.
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if shows(level) and rank == "0":
        print(text, file=sys.stdout if level in ("debug", "info") else sys.stderr, flush=True)


def silence_deepspeed() -> None:
    """Suppress DeepSpeed's message that it found no GPU; call it before DeepSpeed is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
