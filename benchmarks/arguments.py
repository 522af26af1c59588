"""What values of options have to be: bad ones end a program in one line, before it measures
anything.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "check_device",
    "check_peers",
    "int_from_0",
    "one_line",
    "output_folder",
    "picture",
    "positive_float",
    "positive_int",
    "preset_name",
]

MODELS = Path(__file__).resolve().parents[1] / "configs/models"
PICTURES = ".png", ".pdf", ".svg"


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: an integer >= {least}")
    return value


def positive_int(text: str) -> int:
    """How many of something, at least one."""
    return _integer(text, 1)


def int_from_0(text: str) -> int:
    """How many of something, where 0 has a meaning of its own."""
    return _integer(text, 0)


def positive_float(text: str) -> float:
    """Seconds, a learning rate, a size."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: a number > 0")
    return value


def preset_name(text: str) -> str:
    """A model of ``configs/models``."""
    names = sorted(path.stem for path in MODELS.glob("*.json"))
    if text not in names:
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted: one of configs/models: {', '.join(names)}"
        )
    return text


def output_folder(text: str) -> str:
    """A folder that is there, or can be made, and that can be written to."""
    there = next(
        path for path in (Path(text).absolute(), *Path(text).absolute().parents) if path.exists()
    )
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "cannot be written to" if there.is_dir() else "is a file"
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted: a folder to write to; {there} {what}"
        )
    return text


def picture(text: str) -> Path:
    """A file to draw into."""
    if (path := Path(text)).suffix not in PICTURES or path.is_dir():
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted: a file that ends in {', '.join(PICTURES)}"
        )
    output_folder(str(path.absolute().parent))
    return path


def check_peers(given: str) -> Path | None:
    """The archive of Transformer Engine in a folder; None where the folder has the package itself.

    Raises:
        ValueError: it has neither the package nor one archive of it.
    """
    if (Path(given) / "transformer_engine").is_dir():
        return None
    archives = sorted(Path(given).glob("transformer_engine*.tar.*"))
    if len(archives) != 1:
        raise ValueError(
            f"--peers: got {given!r} with {len(archives)} archives, accepted: a folder with "
            "transformer_engine/ or "
            "one transformer_engine*.tar.*"
        )
    return archives[0]


def check_device(device: str) -> None:
    """Check that there is a GPU where ``--device cuda`` asks for one.

    Raises:
        ValueError: there is none.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, accepted: cpu, where there is no GPU")


@contextmanager
def one_line() -> Iterator[None]:
    """Around what looks at options and files before anything is measured: a ValueError there ends
    the program in a line. One of later code is a fault, whose traceback is wanted.
    """
    try:
        yield
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
