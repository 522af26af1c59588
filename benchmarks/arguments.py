"""Options of the programs. A wrong value ends a program in one line before it measures anything."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HELP = {
    "accumulation": "micro-batches of a step",
    "layers": "number of layers of each model",
    "limit": "seconds after which a variant is stopped",
    "micro_batch": "sequences of a micro-batch",
    "model_override": "KEY=VALUE: other values of the model's description",
    "name": "of the JSON result",
    "peers": "folder with Transformer Engine, or with an archive of it",
    "plot": "where to draw the picture",
    "presets": "names in configs/models",
    "ranks": "GPUs",
    "sequence": "tokens of a sequence",
    "tiny": "a model of 0.1 M parameters, to try the program",
    "warm_up": "steps that are not timed",
}
"""What options mean that several programs have, by their names in Python."""


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: an integer >= {least}")
    return value


def positive_int(text: str) -> int:
    """A count of at least 1."""
    return _integer(text, 1)


def int_from_0(text: str) -> int:
    """A count for which 0 has a meaning."""
    return _integer(text, 0)


def positive_float(text: str) -> float:
    """A duration, a learning rate, a size."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, accepted: a number > 0")
    return value


def output_folder(text: str) -> str:
    """A folder that exists or can be made, and that can be written to."""
    folder = Path(text).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted: a folder to write to; {there} is none"
        )
    return text


TYPES = {int: positive_int, float: positive_float}


def argument_parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with ``--output`` and an option for each default.

    The default's type says what an option accepts: an int is a count of at least 1, a float a
    number above 0, ``False`` a flag, a list one or more values of the type of its first, and a
    text or None a text. A program adds other options to the parser itself.

    Args:
        doc: The program's docstring; its first line is the description.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--output",
        type=output_folder,
        help="folder of results and pictures instead of benchmarks/results, docs/figures",
    )
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(option, action="store_true", help=HELP.get(name))
            continue
        nargs, first = None, default
        if isinstance(default, list):
            nargs = "+"
            first = default[0] if default else ""
        parser.add_argument(
            option,
            type=TYPES.get(type(first), str),
            nargs=nargs,
            default=default,
            help=HELP.get(name),
        )
    return parser


def check_multiples(
    parser: argparse.ArgumentParser, option: str, values: Sequence[int], of: int
) -> None:
    """End the program where one of an option's values is no multiple of ``of``."""
    for value in values:
        if value % of:
            parser.error(f"{option}: got {value}, accepted: a multiple of {of}")


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
            "transformer_engine/ or one transformer_engine*.tar.*"
        )
    return archives[0]


@contextmanager
def one_line() -> Iterator[None]:
    """Around checks of options and files before anything is measured: a ValueError there ends the
    program with one line. A ValueError of later code is a fault, and keeps its traceback.
    """
    try:
        yield
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
