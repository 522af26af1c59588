"""The command line of ``prepare_data.py``."""

from __future__ import annotations

import argparse
import os

from launch.command_line import Parser, local_path
from launch.log_level import add_log_level

__all__ = ["TRAIN_BYTES", "parser"]

TRAIN_BYTES = 10**8
"""Of ``--train-bytes``, where it is not given."""

# What Megatron's program and others call these options.
_MEANT = {
    "data": "--input",
    "input-file": "--input",
    "json-keys": "--text-key",
    "num-workers": "--workers",
    "out": "--output",
    "output-prefix": "--output",
    "tokenizer-model": "--tokenizer",
    "tokenizer-type": "--tokenizer",
    "vocab": "--vocab-size",
}


def _number(text: str) -> int:
    """A positive whole number, with an optional k, M or G, small or capital (1000, 1000000, ...)."""
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: a whole number from 1, k, M or G may follow")
    return int(digits) * factor


def _separator(text: str) -> str:
    """A separator as typed in a shell: backslash n and backslash t stand for newline and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The command line."""
    p = Parser(
        prog="prepare_data",
        prefix="prepare_data: ",
        meant=_MEANT,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--input",
        type=local_path,
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH",
        help="files or folders (recursive); 'stdlib' is the running Python's own standard library",
    )
    p.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="PREFIX",
        help="write PREFIX.bin, PREFIX.idx and PREFIX.json",
    )
    p.add_argument(
        "--tokenizer",
        required=True,
        metavar="KIND",
        help="bpe:VOCABSIZE (trained on the input), hf:FILE, FOLDER or org/name, sentencepiece:FILE, "
        "bytes, none (token files)",
    )
    p.add_argument(
        "--workers", type=_number, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)"
    )
    p.add_argument("--text-key", default="text", help="JSON key or Parquet column of the text (default: text)")
    p.add_argument(
        "--separator",
        type=_separator,
        metavar="TEXT",
        help="what separates documents in a text file, e.g. '\\n\\n' (default: a file is one document)",
    )
    p.add_argument("--glob", metavar="PATTERN", help="of folders take the files with such names only, e.g. '*.py'")
    p.add_argument("--max-files", type=_number, metavar="N", help="use the first N files")
    p.add_argument(
        "--max-bytes", type=_number, metavar="N", help="use the first files of together at most N bytes (200M, 2G)"
    )
    p.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the end-of-document id (default: yes)",
    )
    p.add_argument(
        "--eod",
        metavar="TOKEN_OR_ID",
        help="end-of-document token, where the tokenizer does not tell; "
        "with --tokenizer none the id that ends documents in the files",
    )
    p.add_argument("--dtype", choices=["uint16", "uint32"], help="numbers in headerless token files")
    p.add_argument("--vocab-size", type=_number, metavar="N", help="with --tokenizer none: ids are below N")
    p.add_argument(
        "--skip-bad", action="store_true", help="count lines and rows without usable text instead of stopping"
    )
    p.add_argument(
        "--train-bytes",
        type=_number,
        default=TRAIN_BYTES,
        metavar="N",
        help="text that bpe:N learns from (default: 100M)",
    )
    p.add_argument(
        "--shard-bytes",
        type=_number,
        default=8 * 10**6,
        metavar="N",
        help="input of one unit of work that survives a kill (default: 8M)",
    )
    p.add_argument("--overwrite", action="store_true", help="replace an output of other settings")
    p.add_argument("--quiet", action="store_true", help="print errors only, as --log-level error does")
    add_log_level(p)
    return p
