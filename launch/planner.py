"""What a training run needs of a GPU's memory, and how long a step takes, before it is started.

    python -m launch.planner --model llama2-7b --deepspeed_config zero2 --gpus 8 --gpu h100

Exit status: 0 an answer was given, whatever it says; 2 settings that cannot be used or planned.
"""

from __future__ import annotations

import sys

from launch.command_line import options_parser
from launch.plan.options import PlannerOptions

if __name__ == "__main__":
    # A misspelt option is refused before torch is imported.
    options_parser(PlannerOptions, "planner.py").parse_args()

from collections.abc import Sequence

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.plan.arguments import parse
from launch.plan.report import show

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    try:
        run, gpu, args = parse(argv)
        show(run, gpu, args.json)
    except (CoatConfigError, CheckpointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
