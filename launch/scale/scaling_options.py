"""Options of ``scaling.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from launch.common.command_line import (
    ConfiguredOptions,
    LocalPath,
    MemorySize,
    Parser,
    check_recompute,
    option,
    options_parser,
    out_of_range,
)

__all__ = ["ScalingOptions", "parse", "parser"]


_measure = partial(option, group="measuring")


@dataclass(kw_only=True)
class ScalingOptions(ConfiguredOptions):
    """Measure training and collectives on 1, 2, 4, ... of the ranks that are here. Started by
    `torchrun launch/scaling.py ...` or `deepspeed launch/scaling.py ...` (srun: `srun python ...`)
    on one node or several, or by its path on one.
    """

    # No options here: experts and pipelines are not measured.
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    gpu: str | None = None
    gpu_memory: int | None = None
    other_memory: int | None = None

    model: LocalPath | None = option(None, group="model", metavar="FILE")
    """a path, or a name such as llama2-7b"""
    deepspeed_config: list[LocalPath] = option(
        ["zero2", "zero2-bf16"], flags=("--deepspeed_config", "--deepspeed-config"), metavar="FILE"
    )
    """DeepSpeed JSON files, or names such as zero2-bf16: what is measured, one after another"""
    deepspeed: bool = _measure(False)
    """accepted for habit; DeepSpeed always runs"""
    local_rank: int | None = _measure(None, flags=("--local_rank", "--local-rank"))
    """set by the launcher"""
    output: LocalPath | None = _measure(None, metavar="DIR")
    """where everything is written (default: runs/scaling)"""
    overwrite: bool = _measure(False)
    """replace earlier measurements in --output"""
    ranks: list[int] | None = _measure(None, metavar="N")
    """sub-groups (default: 1, 2, 4, ... all)"""
    only: Literal["collectives", "training"] | None = _measure(None)
    """measure nothing else"""
    no_strong: bool = _measure(False)
    """weak scaling alone"""
    steps: int = _measure(10, metavar="N", least=1)
    """timed, of each size"""
    warmup: int = _measure(3, metavar="N", least=0)
    """before them"""
    message_sizes: list[MemorySize] = _measure([], metavar="SIZE")
    """of collectives (default: 4 KiB to 256 MiB, on a CPU 4 MiB)"""
    timeout_minutes: int = _measure(10, metavar="N", least=1)
    """of a collective"""
    measured: LocalPath | None = _measure(None, metavar="DIR")
    """print the tables of an earlier --output, also of an interrupted one; measure nothing"""


def parser() -> Parser:
    """The parser of ``scaling.py``."""
    return options_parser(ScalingOptions, "scaling.py")


def parse(argv: Sequence[str] | None = None) -> ScalingOptions:
    """Parse and check the command line; CoatConfigError names what cannot be used."""
    args = ScalingOptions(**vars(parser().parse_args(argv)))
    problems = [*out_of_range(args), *check_recompute(args)]
    if not (args.model or args.measured or args.only == "collectives"):
        problems.append("--model: missing, accepted: a description (or --only collectives)")
    if problems:
        from coat_dist import CoatConfigError  # late: it imports torch

        raise CoatConfigError("\n".join(problems))
    return args
