"""Options of ``convert_hf.py``; importing them imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from launch.common.command_line import LocalPath, MemorySize, Parser, add_options, option

from .families import FAMILIES


@dataclass(kw_only=True)
class ConvertOptions:
    """Options of ``convert_hf.py``."""

    source: LocalPath = option(flags=("--from", "--input", "--load", "--checkpoint"), metavar="DIR")
    """a training checkpoint, or a Hugging Face folder"""
    target: LocalPath = option(flags=("--to", "--output", "--save"), metavar="DIR")
    """the Hugging Face folder that is made"""
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(None)
    """of the tensors (default: as they are stored; of a training checkpoint bfloat16, what the run
    multiplied with; float32 gives its master weights)
    """
    max_shard_size: MemorySize = option(5 * 10**9, metavar="SIZE")
    """most bytes of tensors in a file, such as 5GB or 500MiB (default: 5GB)"""
    family: Literal[tuple(FAMILIES)] | None = option(None)  # type: ignore[valid-type]
    """model_type of a Hugging Face folder (default: that of config.json, or the first that fits)"""
    model: LocalPath | None = option(None, metavar="FILE")
    """description of the model, of a training checkpoint that has none in it (not of
    pretrain.py)
    """
    verify: bool = option(False)
    """read the result again and compare it with --from, bit by bit"""
    overwrite: bool = option(False)
    """replace a model that is in --to"""
    log_level: Literal["debug", "info", "warning", "error"] = option("info")
    """what is printed: warning leaves out progress and notes"""


def parser(description: str | None) -> Parser:
    """The parser of ``convert_hf.py``."""
    p = Parser(
        prog="convert_hf.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(p, ConvertOptions)
    return p
