"""Options of ``prepare_data.py``; importing them imports neither torch nor Megatron."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from launch.common.command_line import LocalPath, Parser, add_options, option
from launch.common.log_level import LEVEL_HELP


def count(text: str) -> int:
    """A positive whole number, with an optional k, M or G, small or capital (1000, 1000000,
    ...).
    """
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, accepted: a whole number from 1, k, M or G may follow"
        )
    return int(digits) * factor


def separator(text: str) -> str:
    """A separator as typed in a shell: backslash n and backslash t stand for newline and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


Count = Annotated[int, count]
CORES = len(os.sched_getaffinity(0))


@dataclass(kw_only=True)
class PrepareOptions:
    """Options of ``prepare_data.py``."""

    input: list[LocalPath] = option([], metavar="PATH", action="extend")
    """files or folders (recursive); 'stdlib' is the running Python's own standard library"""
    output: LocalPath = option(None, metavar="PREFIX")
    """write PREFIX.bin, PREFIX.idx and PREFIX.json"""
    tokenizer: str = option(None, metavar="KIND")
    """bpe:VOCABSIZE (trained on the input), hf:FILE, FOLDER or org/name, sentencepiece:FILE, or
    bytes
    """
    index: LocalPath | None = option(None, metavar="FILE")
    """instead: check the token files of a description, JSON or YAML (docs/data.md), and index their
    documents, before a run does so on its GPUs
    """
    data_cache: LocalPath | None = option(None, metavar="DIR")
    """with --index: as it is given to pretrain.py (default: FILE.cache)"""
    workers: Count = option(CORES, metavar="N")
    """processes (default: one a core)"""
    text_key: str = option("text", metavar="KEY")
    """JSON key or Parquet column of the text"""
    separator: Annotated[str, separator] | None = option(None, metavar="TEXT")
    """what separates documents in a text file, e.g. '\\n\\n' (default: a file is one document)"""
    glob: str | None = option(None, metavar="PATTERN")
    """of folders take the files with such names only, e.g. '*.py'"""
    max_files: Count | None = option(None, metavar="N")
    """use the first N files"""
    max_bytes: Count | None = option(None, metavar="N")
    """use the first files of together at most N bytes (200M, 2G)"""
    append_eod: bool = option(True, action=argparse.BooleanOptionalAction)
    """end every document with the end-of-document id (default: yes)"""
    eod: str | None = option(None, metavar="TOKEN_OR_ID")
    """end-of-document token, where the tokenizer names none"""
    skip_bad: bool = option(False)
    """count lines and rows without usable text instead of stopping"""
    train_bytes: Count = option(10**8, metavar="N")
    """text that bpe:N learns from (default: 100M)"""
    shard_bytes: Count = option(8 * 10**6, metavar="N")
    """input of one unit of work that survives a kill (default: 8M)"""
    overwrite: bool = option(False)
    """replace an output of other settings"""
    quiet: bool = option(False)
    """print errors only, as --log-level error does"""
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help=LEVEL_HELP)
    """how much is printed"""


def parser(description: str | None = None) -> Parser:
    """The parser of ``prepare_data.py``."""
    raw = argparse.RawDescriptionHelpFormatter
    p = Parser(
        prog="prepare_data",
        prefix="prepare_data: ",
        description=description,
        formatter_class=raw,
    )
    add_options(p, PrepareOptions)
    return p
