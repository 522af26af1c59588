"""Time training steps on the ranks that a launcher has started, and compare numbers of ranks.

    for ranks in 1 2 4 8; do
        torchrun --nproc-per-node $ranks launch/scaling.py --model llama2-7b \\
            --deepspeed_config zero2 --strong 8 --output runs/scaling
    done

Each command adds its measurement to ``measured.json`` in --output, and writes and prints the tables
of all of them. It runs on several nodes as pretrain.py does. Weak scaling keeps the micro-batches
of a rank; with --strong N the steps of N ranks are measured as well. Exit status: 0 done; 2
settings that cannot be used; 5 out of memory, the earlier measurements are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launch.scale import scaling_options
from launch.train.allocator import expandable_segments

if __name__ == "__main__":
    scaling_options.parser().parse_args()  # a misspelt option is refused before torch is imported
    expandable_segments()  # read when torch's allocator begins

import json
import os
from collections.abc import Sequence
from typing import Any

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, write_text
from coat_dist.deepspeed.without_launcher import take_ranks
from coat_dist.ranks import on_rank_0
from launch.common import failing
from launch.common.log_level import say, set_log_level, silence_deepspeed
from launch.scale.tables import markdown
from launch.scale.timed_steps import Measurement, plan_of
from launch.train import runtime
from launch.train.exhausted import is_out_of_memory

FILE = "measured.json"


def earlier(folder: Path, one: Measurement) -> dict[str, Any]:
    """What :data:`FILE` holds of this model, before a measurement.

    Raises:
        CoatConfigError: the folder holds measurements of something else, or cannot be written.
    """
    path = folder / FILE
    identity = one.identity()
    try:
        make_folder(folder)
        if not path.exists():
            return {"format": 1, "identity": {**identity, "settings": {}}, "records": []}
        there = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CoatConfigError(
            f"--output: got {folder}, accepted: a folder to write to ({problem})"
        ) from None
    named = f"configuration {one.variant}"
    known = {**there["identity"], named: there["identity"]["settings"].get(one.variant)}
    own = {**identity, named: one.settings}
    if other := [key for key in own if known.get(key) not in (None, own[key])]:
        raise CoatConfigError(
            f"--output: got {folder}, which holds measurements of another {', '.join(other)}, "
            "accepted: another folder"
        )
    return there


def _measure(args: scaling_options.ScalingOptions) -> None:
    device = runtime.start(args.local_rank, args.timeout_minutes)
    one = plan_of(args, device)
    folder = Path(args.output)
    there = on_rank_0(lambda: earlier(folder, one))
    record = one.measure(device)
    if os.environ["RANK"] != "0":
        return
    key = record["key"]["variant"], record["ranks"]
    kept = [r for r in there["records"] if (r["key"].get("variant"), r["ranks"]) != key]
    there["records"] = [*kept, record]
    there["identity"]["settings"][one.variant] = one.settings
    write_text(folder / FILE, json.dumps(there, indent=1))
    text = markdown(there)
    write_text(folder / "scaling.md", text)
    say(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    rank = 0
    try:
        take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = scaling_options.parse(argv)
        set_log_level(args.log_level)
        silence_deepspeed()
        _measure(args)
    except CoatConfigError as problem:
        failing.end(str(problem), rank)
        return 2
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
        failing.end(str(problem), rank, kind="out of memory")
        return 5
    runtime.finish()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # no waiting for ranks that will not come
