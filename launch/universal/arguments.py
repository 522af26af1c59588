"""Command line of ``to_universal.py``: its own, and that of DeepSpeed's ``ds_to_universal.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch.command_line import Parser, local_path, whole_number
from launch.log_level import add_log_level

__all__ = ["parse", "without_effect"]

_DEEPSPEED = {
    "num_extract_workers": "one process reads everything",
    "num_merge_workers": "one process writes everything",
    "keep_temp_folder": "there are no temporary files",
    "strict": "every check is made",
    "no_strict": "every check is made",
    "inject_missing_state": "with one tensor-parallel rank nothing is missed, with several it cannot be guessed",
}
"""Options of DeepSpeed's program that change nothing here, and why."""


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line. What is typed wrong is one line, with status 2."""
    p = Parser(
        prog="to_universal.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        meant={"input": "--load", "source": "--load", "out": "--output", "save": "--output"},
    )
    p.add_argument(
        "--load",
        "--input_folder",
        "--input-folder",
        type=local_path,
        required=True,
        metavar="DIR",
        help="a checkpoint of DeepSpeed's ZeRO, or a folder whose `latest` names one",
    )
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--output",
        type=local_path,
        metavar="DIR",
        help="gets the universal checkpoint under its own name, `latest` and `latest_universal`",
    )
    where.add_argument(
        "--output_folder",
        "--output-folder",
        type=local_path,
        metavar="DIR",
        help="becomes the universal checkpoint; `latest_universal` beside it names it, as DeepSpeed's program does",
    )
    add_log_level(p)
    g = p.add_argument_group("options of DeepSpeed's ds_to_universal.py, taken without effect")
    for name, why in _DEEPSPEED.items():
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        if name.startswith("num_"):
            g.add_argument(*names, dest=name, type=whole_number, metavar="N", help=why)
        else:
            g.add_argument(*names, dest=name, action="store_true", help=why)
    return p.parse_args(argv)


def without_effect(args: argparse.Namespace) -> list[str]:
    """A line for every option that was given and changes nothing."""
    given = [name for name in _DEEPSPEED if getattr(args, name) not in (None, False)]
    return [f"note: --{name} has no effect: {_DEEPSPEED[name]}" for name in given]
