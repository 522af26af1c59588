"""Whether memory grows over a long run: launch/pretrain.py's own training, small, for thousands of steps.

    python -m benchmarks.reliability.memory
    torchrun --nproc_per_node 2 -m benchmarks.reliability.memory --stage 3

Everything of a run is in it: data, FP8 flow, ZeRO, evaluation, checkpoints, metrics. Every rank is looked at; what
counts is what is held after a quarter of the steps, when caches are filled, and at the end. Exit status 1: it grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.arguments import positive_int
from benchmarks.common import argument_parser, options, write_result

MODEL = {
    **{"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "seq_length": 64},
    "vocab_size": None,
}
LIMITS = {"rss": 8e6, "allocated": 0, "reserved": 0, "descriptors": 0, "threads": 0}
"""By which each may have grown at the end: bytes, or how many. malloc keeps what it likes: a leak of 64 bytes a tensor
and step is above 8 MB."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    p = argument_parser(__doc__ or "")
    p.add_argument("--steps", type=positive_int, default=2000)
    p.add_argument("--stage", type=int, default=2, choices=[1, 2, 3], help="of ZeRO")
    p.add_argument("--every", type=positive_int, default=100, help="steps between two looks")
    p.add_argument("--save-every", type=positive_int, default=500, help="steps between two checkpoints and evaluations")
    p.add_argument("--name", default=None, help="of the result: memory-NAME.json")
    args = p.parse_args(argv)
    if args.every < 1 or args.steps < 8 * args.every:
        p.error(f"--every: got {args.every} of {args.steps} steps, accepted: 1 to an eighth of --steps")
    return args


def held() -> dict[str, int]:
    """What this process holds now; bytes, or how many."""
    gc.collect()
    me = psutil.Process()
    found = {"rss": me.memory_info().rss, "descriptors": me.num_fds(), "threads": me.num_threads()}
    found["objects"] = len(gc.get_objects())
    if torch.cuda.is_available():
        found |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return found


def grown(looks: Sequence[dict[str, int]], limits: dict[str, float]) -> dict[str, int]:
    """By how much each of ``limits`` is more at the last look than at the highest of the second quarter, if it is."""
    quarter = max(len(looks) // 4, 1)
    early = looks[quarter : 2 * quarter] or looks[:1]
    found = {key: looks[-1][key] - max(one[key] for one in early) for key in limits if key in looks[-1]}
    return {key: more for key, more in found.items() if more > limits[key]}


def prepare(args: argparse.Namespace) -> str:
    """A folder with random tokens, a model and a DeepSpeed file; its path."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    generator = torch.Generator().manual_seed(0)
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=np.uint16)
    for _ in range(200):
        builder.add_document(torch.randint(1, 250, (100,), generator=generator), [100])
    builder.finalize(str(folder / "data.idx"))
    (folder / "data.json").write_text(json.dumps({"vocab_size": 250, "eod": 0}))
    (folder / "model.json").write_text(json.dumps(MODEL))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-4}},
        "coat": {"optimizer": {}, "activation": {}},
    }
    (folder / "deepspeed.json").write_text(json.dumps(config))
    return str(folder)


def run(args: argparse.Namespace) -> int:
    """Train, look, judge; the exit status."""
    from coat_dist.ranks import gather, on_rank_0
    from launch import pretrain
    from launch.training import arguments, runtime

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29555")):
        os.environ.setdefault(name, value)
    device = runtime.start(None)
    folder = Path(on_rank_0(lambda: prepare(args)))
    looks: list[dict[str, int]] = []

    def interfere(loop: Any) -> None:
        step = loop._step

        def looked_at() -> Any:
            record = step()
            if loop.progress.step % args.every == 0:
                looks.append(held())
            return record

        loop._step = looked_at

    argv = ["--deepspeed_config", folder / "deepspeed.json", "--model", folder / "model.json"]
    argv += ["--data", folder / "data", "--split", "80,10,10", "--train-steps", args.steps, "--log-level", "warning"]
    argv += ["--output", folder / "run", "--save", folder / "save", "--keep-last", "2"]
    argv += ["--save-interval", args.save_every, "--eval-interval", args.save_every, "--eval-steps", "2"]
    pretrain.set_log_level("warning")
    p = pretrain.plan(arguments.parse(list(map(str, argv))), int(os.environ["WORLD_SIZE"]))
    ending = pretrain.train(p, device, interfere=interfere)
    everyone = gather(looks)
    runtime.finish()
    if int(os.environ["RANK"]):
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    growing = [grown(of_rank, LIMITS) for of_rank in everyone]
    ranks = [{key: [look[key] for look in of_rank] for key in of_rank[0]} for of_rank in everyone]
    name = "reliability/memory" + (f"-{args.name}" if args.name else "")
    path = write_result(
        name, {"options": options(args), "ended": ending.split(";")[0], "grown": growing, "ranks": ranks}, args.output
    )
    for rank, (of_rank, more) in enumerate(zip(everyone, growing, strict=True)):
        first, last = of_rank[max(len(of_rank) // 4, 1) - 1], of_rank[-1]
        said = ", ".join(f"{key} {first[key]:,} -> {last[key]:,}" for key in last)
        print(f"rank {rank}: {'GROWS' if more else 'does not grow'}: {said}")
    print(path)
    return int(any(growing))


if __name__ == "__main__":
    sys.exit(run(parse()))
