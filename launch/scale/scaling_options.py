"""Options of ``scaling.py``; importing them imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from launch.common.command_line import (
    ConfiguredOptions,
    LocalPath,
    Parser,
    check_recompute,
    option,
    options_parser,
    out_of_range,
)

_measure = partial(option, group="measuring")


@dataclass(kw_only=True)
class ScalingOptions(ConfiguredOptions):
    """Time training steps on the ranks that are here, and print them beside earlier measurements on
    other numbers of ranks. Started by `torchrun launch/scaling.py ...` or `deepspeed
    launch/scaling.py ...` (srun: `srun python ...`), once for each number of ranks.
    """

    # No options here: experts and pipelines are not measured.
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    other_memory: int | None = None

    model: LocalPath = option(group="model", metavar="FILE")
    """a path, or a name such as llama2-7b"""
    deepspeed_config: LocalPath = option(
        "zero2", flags=("--deepspeed_config", "--deepspeed-config"), metavar="FILE"
    )
    """DeepSpeed JSON, or a name such as zero2-bf16"""
    deepspeed: bool = _measure(False)
    """accepted for habit; DeepSpeed always runs"""
    local_rank: int | None = _measure(None, flags=("--local_rank", "--local-rank"))
    """set by the launcher"""
    output: LocalPath = _measure("runs/scaling", metavar="DIR")
    """folder of the measurements and their tables, the same for all numbers of ranks"""
    strong: int | None = _measure(None, metavar="N", least=1)
    """also time steps with the samples that N ranks have in weak scaling"""
    steps: int = _measure(10, metavar="N", least=1)
    """timed, of each size"""
    warmup: int = _measure(3, metavar="N", least=0)
    """before them"""
    timeout_minutes: int = _measure(10, metavar="N", least=1)
    """of a collective"""


def parser() -> Parser:
    """The parser of ``scaling.py``."""
    return options_parser(ScalingOptions, "scaling.py")


def parse(argv: Sequence[str] | None = None) -> ScalingOptions:
    """Parse and check the command line; CoatConfigError names what cannot be used."""
    args = ScalingOptions(**vars(parser().parse_args(argv)))
    if problems := [*out_of_range(args), *check_recompute(args)]:
        from coat_dist import CoatConfigError  # late: it imports torch

        raise CoatConfigError("\n".join(problems))
    return args
