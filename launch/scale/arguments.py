"""Options of ``scaling.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from launch.command_line import (
    LocalPath,
    Parser,
    check_recompute,
    option,
    options_parser,
    out_of_range,
)
from launch.plan.gpus import memory_bytes
from launch.plan.options import ConfiguredOptions

__all__ = ["VARIANTS", "ScalingOptions", "parse", "parser"]

VARIANTS = ("coat", "bf16")  # with the "coat" block and without


def _several(convert: Callable[[str], Any], accepted: str) -> Callable[[str], tuple]:
    def several(text: str) -> tuple:
        try:
            return tuple(sorted({convert(part) for part in text.split(",")}))
        except ValueError:
            message = f"got {text!r}, accepted: {accepted}, with commas between"
            raise argparse.ArgumentTypeError(message) from None

    return several


_Variants = Annotated[
    tuple[str, ...], _several(lambda text: VARIANTS[VARIANTS.index(text)], "coat, bf16")
]
_Ranks = Annotated[tuple[int, ...], _several(int, "numbers of ranks")]
_Sizes = Annotated[tuple[int, ...], _several(memory_bytes, "sizes such as 64KiB,16MiB")]

_measure, _predict = partial(option, group="measuring"), partial(option, group="predicting")


@dataclass(kw_only=True)
class ScalingOptions(ConfiguredOptions):
    """Measure training and collectives on 1, 2, 4, ... of the ranks that are here, and predict
    larger clusters. Started by `torchrun launch/scaling.py ...` or `deepspeed launch/scaling.py
    ...` (srun: `srun python ...`) on one node or several, or by its path on one.
    """

    # No options here: experts and pipelines are not measured.
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    gpu: str | None = None
    gpu_memory: str | None = None
    other_memory: str | None = None

    model: LocalPath | None = option(None, group="model", metavar="FILE")
    """a path, or a name such as llama2-7b"""
    deepspeed: bool = _measure(False)
    """accepted for habit; DeepSpeed always runs"""
    local_rank: int | None = _measure(None, flags=("--local_rank", "--local-rank"))
    """set by the launcher"""
    output: LocalPath | None = _measure(None, metavar="DIR")
    """where everything is written (default: runs/scaling)"""
    overwrite: bool = _measure(False)
    """replace earlier measurements in --output"""
    ranks: _Ranks | None = _measure(None, metavar="N,N")
    """sub-groups (default: 1, 2, 4, ... all)"""
    variants: _Variants = _measure(VARIANTS, metavar="NAME,NAME")
    """coat: with the block; bf16: without"""
    only: Literal["collectives", "training"] | None = _measure(None)
    """measure nothing else"""
    no_strong: bool = _measure(False)
    """weak scaling alone"""
    steps: int = _measure(10, metavar="N", least=1)
    """timed, of each size"""
    warmup: int = _measure(3, metavar="N", least=0)
    """before them"""
    message_sizes: _Sizes = _measure((), metavar="SIZE,SIZE")
    """of collectives (default: 4 KiB to 256 MiB, on a CPU 4 MiB)"""
    timeout_minutes: int = _measure(10, metavar="N", least=1)
    """of a collective"""
    predict: _Ranks = _predict((), metavar="N,N")
    """ranks of larger clusters"""
    measured: LocalPath | None = _predict(None, metavar="DIR")
    """an earlier --output; measure nothing"""
    gpus_per_node: int | None = _predict(None, metavar="N", least=1)
    """(default: as started here, else 8)"""


def parser() -> Parser:
    """The parser of ``scaling.py``."""
    return options_parser(ScalingOptions, "scaling.py")


def parse(argv: Sequence[str] | None = None) -> ScalingOptions:
    """Parse and check the command line; CoatConfigError names what cannot be used."""
    args = ScalingOptions(**vars(parser().parse_args(argv)))
    problems = [*out_of_range(args), *check_recompute(args)]
    if not (args.model or args.measured or args.only == "collectives"):
        problems.append("--model: missing, accepted: a description (or --only collectives)")
    if any(ranks % args.tensor_parallel for ranks in args.predict):
        accepted = f"multiples of --tensor-parallel ({args.tensor_parallel})"
        problems.append(f"--predict: got {', '.join(map(str, args.predict))}, accepted: {accepted}")
    if problems:
        from coat_dist import CoatConfigError  # late: it imports torch

        raise CoatConfigError("\n".join(problems))
    return args
