"""Command line of ``convert_hf.py``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from launch.command_line import Parser, local_path, whole_number
from launch.hf.convert import HUGGING_FACE, MEGATRON
from launch.hf.families import FAMILIES
from launch.log_level import add_log_level
from launch.weights.source import DTYPES

__all__ = ["parse", "size", "without_effect"]

_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}}
_UNITS |= {f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)}


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parse the command line. What is typed wrong is one line, with status 2."""
    p = Parser(prog="convert_hf.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--from",
        "--input",
        "--load",
        "--checkpoint",
        dest="source",
        type=local_path,
        required=True,
        metavar="DIR",
        help="a Hugging Face folder, a training checkpoint, or a folder that this program wrote",
    )
    p.add_argument(
        "--to",
        "--output",
        "--save",
        dest="target",
        type=local_path,
        required=True,
        metavar="DIR",
        help="folder that is made: ours from a Hugging Face folder, a Hugging Face folder from anything else",
    )
    p.add_argument(
        "--format",
        choices=[HUGGING_FACE, MEGATRON],
        default=None,
        help="of --to, where it is not to be the other one than --from's: to round, or to divide into other files",
    )
    p.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        default=None,
        help="of the tensors (default: as they are; of a training checkpoint bfloat16, what the run multiplied with. "
        "float32 gives its master weights)",
    )
    p.add_argument(
        "--max-shard-size",
        type=size,
        default=size("5GB"),
        metavar="SIZE",
        help="most bytes of tensors in a file, such as 5GB or 500MiB (default: 5GB)",
    )
    p.add_argument(
        "--like",
        type=local_path,
        default=None,
        metavar="DIR|PREFIX",
        help="folder whose tokenizer files and config.json a Hugging Face folder gets, or prepared data with its "
        "tokenizer (default: those that came with the weights, else the tokenizer of the run's data)",
    )
    p.add_argument(
        "--family",
        choices=sorted(FAMILIES),
        default=None,
        help="model_type of a Hugging Face folder (default: that of config.json, or the first that fits)",
    )
    p.add_argument(
        "--model",
        type=local_path,
        default=None,
        metavar="FILE",
        help="description of the model, of a training checkpoint that has none in it (not of pretrain.py)",
    )
    p.add_argument("--verify", action="store_true", help="read what was written and compare it with --from, bit by bit")
    p.add_argument("--overwrite", action="store_true", help="replace a model that is in --to")
    add_log_level(p)
    g = p.add_argument_group("taken without effect: what is written fits any number of ranks")
    g.add_argument("--tensor-parallel", type=whole_number, metavar="N")
    g.add_argument("--pipeline-parallel", type=whole_number, metavar="N")
    return p.parse_args(argv)


def size(text: str) -> int:
    """A number of bytes, as a type of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if (
        match is None
        or match[2].upper() not in _UNITS
        or (found := int(float(match[1]) * _UNITS[match[2].upper()])) < 1
    ):
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: bytes, such as 5GB or 500MiB")
    return found


def without_effect(args: argparse.Namespace) -> list[str]:
    """A line for every option that was given and changes nothing."""
    return [
        f"note: --{name}-parallel has no effect: what is written has whole tensors, of which each rank takes its part"
        for name in ("tensor", "pipeline")
        if getattr(args, f"{name}_parallel") is not None
    ]
