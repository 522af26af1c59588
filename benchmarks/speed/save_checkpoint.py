"""`engine.save_checkpoint` and `load_checkpoint`: plain DeepSpeed's time, and what checksums and
the disk add to it.

    torchrun --nproc_per_node 1 -m benchmarks.speed.save_checkpoint [--stage 2] [--millions 40] \\
        [--output DIR]

One engine, whose `save_checkpoint` is DeepSpeed's own and the whole one in turns, on the device
that there is. Plain DeepSpeed leaves data in the system's memory; "and fsync" is the time until a
second program has brought its files to disk. Times are by the host's clock: medians, and ratios to
plain DeepSpeed in the same run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import argument_parser
from benchmarks.common import options, show, write_result
from benchmarks.timing import median, wall_ms
from launch.train.runtime import start


def build(arguments: argparse.Namespace) -> Any:
    """An engine with CoatAdamW that has taken a step."""
    import coat_dist

    width = 1024
    layers = max(1, round(arguments.millions * 1e6 / width**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": arguments.stage},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-5}},
        "coat": {"activation": {"enabled": False}},
    }
    engine, *_ = coat_dist.initialize(model=model, config=config, dist_init_required=False)
    x = torch.ones(1, width, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return engine


def sync(folder: Path) -> None:
    """Bring all files of a folder to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def measure(engine: Any, folder: Path, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of each way, by its name."""
    whole_save, whole_load = engine.save_checkpoint, engine.load_checkpoint
    plain_save = whole_save.__wrapped__

    def synced() -> None:
        plain_save(str(folder), tag="synced")
        if dist.get_rank() == 0:
            sync(folder / "synced")
        dist.barrier()

    ways: dict[str, Callable[[], Any]] = {
        "DeepSpeed": lambda: plain_save(str(folder), tag="plain"),
        "DeepSpeed and fsync": synced,
        "whole": lambda: whole_save(str(folder), tag="whole"),
        "load, sizes only": lambda: whole_load(str(folder), tag="whole", verify=False),
        "load, verified": lambda: whole_load(str(folder), tag="whole"),
    }
    tags = {"DeepSpeed": "plain", "DeepSpeed and fsync": "synced", "whole": "whole"}
    first = dist.get_rank() == 0
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeat + 1):
        for name, call in ways.items():
            if first:
                if name in tags:
                    shutil.rmtree(folder / tags[name], ignore_errors=True)  # each writes new files
                sync(folder)  # what the one before left in memory
            dist.barrier()
            took = wall_ms(call, synchronize=torch.cuda.is_available())
            if number:
                times[name].append(took)
    return times


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program; the model has ``--millions`` of parameters."""
    parser = argument_parser(__doc__, millions=40.0, repeat=7)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument(
        "--folder", help="where checkpoints go for the time of this program (a temporary folder)"
    )
    parser.add_argument(
        "--disk", default="", help="what the disk is, to be written into the result"
    )
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    start(int(os.environ["LOCAL_RANK"]))
    engine = build(arguments)
    folder: list[Any] = [tempfile.mkdtemp(dir=arguments.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    times = measure(engine, Path(folder[0]), arguments.repeat)
    if dist.get_rank() == 0:
        size = sum(p.stat().st_size for p in Path(folder[0], "whole").iterdir())
        shutil.rmtree(folder[0])
        rows: list[dict[str, Any]] = [
            {
                "way": name,
                "ms": median(values),
                "all_ms": values,
                "to DeepSpeed": median(values) / median(times["DeepSpeed"]),
                "to DeepSpeed and fsync": median(values) / median(times["DeepSpeed and fsync"]),
            }
            for name, values in times.items()
        ]
        print(f"{size / 1e6:.0f} MB, ZeRO-{arguments.stage}, {dist.get_world_size()} rank(s)")
        ratios = {"to DeepSpeed": ".2f", "to DeepSpeed and fsync": ".2f"}
        for row in rows:
            show(row["way"], row, ms=".0f", **ratios)
        result = {
            **options(arguments, "folder"),
            "ranks": dist.get_world_size(),
            "bytes": size,
            "ways": rows,
        }
        print("wrote", write_result("speed/save-checkpoint", result, arguments.output))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
