"""Measure training and collectives on 1, 2, 4, ... ranks, predict larger clusters.

    torchrun --nproc-per-node 8 launch/scaling.py --model llama2-7b --deepspeed_config zero2 --output runs/scaling

Exit status: 0 done; 1 a measurement failed, the others are written; 2 settings that cannot be used; 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

# Read when these are imported: this process holds no GPU, and leaves them to those that it starts.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from coat_dist import CoatConfigError
from coat_dist.checkpoint.write.durable import make_folder, sync_folder, write_text
from coat_dist.deepspeed.build.slurm import take_ranks
from launch import failing
from launch.log_level import say, set_log_level
from launch.plan.arguments import silence_deepspeed
from launch.scale import arguments, measuring
from launch.scale.crew import Crew
from launch.scale.predict import paper, predictions
from launch.scale.records import Records, read
from launch.scale.tables import draw, markdown, summary

__all__ = ["main"]


def _measure(args: Any) -> int:
    """Measure, then say what was found; the exit status. All ranks come here."""
    import torch

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    here = args.gpus or (max(args.ranks) if args.ranks else max(1, torch.cuda.device_count()))
    if not launched and torch.cuda.is_available() and here > torch.cuda.device_count():
        raise CoatConfigError(f"--gpus: got {here}, accepted: up to {torch.cuda.device_count()}, the GPUs here")
    world = int(os.environ["WORLD_SIZE"]) if launched and args.gpus is None else here
    sizes = arguments.sub_groups(args, world)
    identity = measuring.identity_of(args)
    measuring.check(args, identity, sizes)
    crew = Crew(None if launched and args.gpus is None and world > 1 else world)
    if not crew.first:
        crew.follow()
        return 0
    try:
        records = Records(args.output, {**identity, **measuring.machine(crew)}, args.overwrite)
        failed = measuring.measure(args, crew, identity, sizes, records)
    finally:
        crew.dismiss()
    there = {"identity": records.identity, "records": records.found}
    _publish(args, there, args.output)
    return 1 if failed else 0


def _publish(args: Any, there: Mapping[str, Any], folder: str | None) -> None:
    """Print the tables, and write them with a picture.

    Raises:
        CoatConfigError: something that was asked for cannot be predicted; after all else was printed and written.
    """
    links, wrong = arguments.links(args), None
    try:
        predicted = predictions(there, args.predict, links, args.gpus_per_node, args.hold_out)
    except CoatConfigError as problem:
        wrong = problem
        predicted = predictions(there, (), links, args.gpus_per_node)
    found = summary(there, predicted)
    text = markdown(found)
    say(text)
    if folder is not None:
        _write(found, text, there, folder)
    if wrong is not None:
        raise wrong


def _write(found: Mapping[str, Any], text: str, there: Mapping[str, Any], folder: str) -> None:
    place = Path(folder)
    make_folder(place)
    write_text(place / "scaling.json", json.dumps(found, indent=1))
    write_text(place / "scaling.md", text)
    samples = [sample for one in there["records"] for sample in one.get("samples", ())]
    temporary = place / ".scaling.new.png"
    draw(found, samples, temporary)
    os.replace(temporary, place / "scaling.png")
    sync_folder(place)
    say(f"wrote scaling.md, scaling.json and scaling.png in {folder}")


def _paper(args: Any) -> None:
    """Print the table of predictions; with ``--output`` also write it."""
    text = paper(args, arguments.links(args))
    say(text)
    if args.output is not None:
        make_folder(Path(args.output))
        write_text(Path(args.output) / "paper.md", text + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    rank = 0
    try:
        take_ranks()
        rank = int(os.environ.get("RANK", 0))
        args = arguments.parse(argv)
        set_log_level(args.log_level)
        silence_deepspeed()
        if args.paper:
            if rank == 0:
                _paper(args)
            return 0
        if args.measured is not None:
            if rank == 0:
                _publish(args, read(args.measured), args.output)
            return 0
        return _measure(args)
    except CoatConfigError as problem:
        failing.end(str(problem), rank)
        return 2
    except OSError as problem:
        failing.end(f"--output: {problem}, accepted: a folder to write to", rank)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print("scaling: interrupted; the same command goes on with what is not measured yet", file=sys.stderr)
        return 130


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # no waiting for ranks that will not come
