"""Measure training and collectives on 1, 2, 4, ... ranks.

    torchrun --nproc-per-node 8 launch/scaling.py --model llama2-7b --output runs/scaling \\
        --deepspeed_config zero2 zero2-bf16

Exit status: 0 done; 1 a measurement failed, the others are written; 2 settings that cannot be used;
130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.scale import scaling_options

if __name__ == "__main__":
    scaling_options.parser().parse_args()  # a misspelt option is refused before torch is imported

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text
from coat_dist.deepspeed.without_launcher import take_ranks
from launch.common import failing
from launch.common.log_level import say, set_log_level, silence_deepspeed
from launch.scale import measuring
from launch.scale.crew import Crew, sub_groups
from launch.scale.tables import markdown

__all__ = ["main"]


def _measure(args: scaling_options.ScalingOptions) -> int:
    """Measure, then print the tables; the exit status. All ranks come here."""
    import torch

    here = args.gpus or (max(args.ranks) if args.ranks else max(1, torch.cuda.device_count()))
    crew = Crew.of_launcher() or Crew(nodes=1, per_node=here)
    sizes = sub_groups(args, crew)
    identity = measuring.identity_of(args, crew)
    jobs = measuring.jobs(args, identity, sizes, crew)
    folder = Path(args.output or "runs/scaling")
    if int(os.environ.get("LOCAL_RANK", 0)):
        return 0
    if crew.node == 0:
        if (folder / measuring.FILE).exists() and not args.overwrite:
            raise CoatConfigError(
                f"--output: got {folder}, which holds measurements, accepted: another folder, or "
                "--overwrite"
            )
        make_folder(folder)
    there = measuring.measure(crew, identity, jobs, folder)
    if crew.node == 0:
        _publish(there, folder)
    return 1 if any("failed" in one for one in there["records"]) else 0


def _publish(there: Mapping[str, Any], folder: Path | None) -> None:
    """Print the tables; with a folder write them there, too."""
    text = markdown(there)
    say(text)
    if folder is not None:
        make_folder(folder)
        write_text(folder / "scaling.md", text)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    rank = 0
    try:
        take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = scaling_options.parse(argv)
        set_log_level(args.log_level)
        silence_deepspeed()
        if args.measured is None:
            return _measure(args)
        there = json.loads(Path(args.measured, measuring.FILE).read_text(encoding="utf-8"))
        if rank == 0:
            _publish(there, None if args.output is None else Path(args.output))
        return 0
    except (OSError, ValueError) as problem:  # a CoatConfigError is a ValueError
        failing.end(str(problem), rank)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print("scaling: interrupted; --measured shows what was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # no waiting for ranks that will not come
