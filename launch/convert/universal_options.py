"""Options of ``to_universal.py``; importing them imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from launch.common.command_line import Parser, local_path, whole_number
from launch.common.log_level import add_log_level


def parser(description: str | None) -> Parser:
    """The parser of ``to_universal.py``: our own options, and those of DeepSpeed's
    ``ds_to_universal.py``.
    """
    p = Parser(
        prog="to_universal.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder: dict[str, Any] = {"type": local_path, "metavar": "DIR"}
    source = "a checkpoint of DeepSpeed's ZeRO, or a folder whose `latest` names one"
    p.add_argument(
        "--load", "--input_folder", "--input-folder", required=True, help=source, **folder
    )
    where = p.add_mutually_exclusive_group(required=True)
    outer = "gets the universal checkpoint under its own name, `latest` and `latest_universal`"
    where.add_argument("--output", help=outer, **folder)
    exact = (
        "becomes the universal checkpoint; `latest_universal` beside it names it, as "
        "DeepSpeed's program does"
    )
    where.add_argument("--output_folder", "--output-folder", help=exact, **folder)
    add_log_level(p)
    theirs = p.add_argument_group("options of DeepSpeed's ds_to_universal.py, without effect here")
    for name in ("num_extract_workers", "num_merge_workers"):
        theirs.add_argument(
            f"--{name}", f"--{name.replace('_', '-')}", type=whole_number, metavar="N"
        )
    theirs.add_argument("--strict", action="store_true")
    for name in ("keep_temp_folder", "no_strict", "inject_missing_state"):
        theirs.add_argument(f"--{name}", f"--{name.replace('_', '-')}", action="store_true")
    return p
