"""End to end: the same pretraining run with and without the "coat" block, through DeepSpeed's launcher.

    python -m benchmarks.speed.train --ranks 1 [--steps 50] [--layers 8] [--model configs/models/llama2-7b.json]

Each run is `launch/pretrain.py` with one configuration of `configs/deepspeed`; text is the running Python's standard
library. Prints, for each configuration, the median step, tokens/s/GPU, peak memory and final loss, and the ratio to the
first one (the baseline); writes `speed/train-N-ranks.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, argument_parser, options, prepare_text, python_path, write_result
from benchmarks.timing import median

WARM_UP = 10


def run(config: str, data: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One pretraining run; its records and what its memory table says."""
    out = folder / config
    settings = json.loads((ROOT / f"configs/deepspeed/{config}.json").read_text())
    settings["train_micro_batch_size_per_gpu"] = arguments.micro_batch
    settings["gradient_accumulation_steps"] = arguments.accumulation
    path = folder / f"{config}.json"
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(arguments.ranks)]
    command += ["--log_level", "error"]
    command += ["--master_port", "29517", "launch/pretrain.py", "--deepspeed", "--deepspeed_config", str(path)]
    command += ["--model", arguments.model, "--data", data, "--output", str(out), "--train-steps", str(arguments.steps)]
    command += ["--lr", str(arguments.lr), "--warmup-steps", str(max(1, arguments.steps // 2))]
    command += ["--tensor-parallel", str(arguments.tensor_parallel)]
    command += ["--sequence-parallel"] if arguments.tensor_parallel > 1 else []
    overrides = [f"num_layers={arguments.layers}"] if arguments.layers else []
    overrides += arguments.model_override
    command += ["--model-override", *overrides] if overrides else []
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    print(f"== {config}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steady = records[min(WARM_UP, len(records) - 1) :]
    return {
        "config": config,
        "losses": [r["loss"] for r in records],
        "grad_norms": [r["grad_norm"] for r in records],
        "step_ms": 1e3 * median([r["step_time"] for r in steady]),
        "tokens_per_second_per_gpu": median([r["tokens_per_second_per_gpu"] for r in steady]),
        "peak_memory_gib": max(r["peak_memory_bytes"] for r in records) / 2**30,
        "memory": json.loads((out / "memory.json").read_text()),
    }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--configs", nargs="+", default=["zero2-bf16", "zero2"], help="the first one is the baseline")
    parser.add_argument("--model", default="configs/models/llama2-7b.json")
    parser.add_argument("--model-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--layers", type=int, default=8, help="layers of that model; 0 = all")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    # Gentle on purpose: with 8 k tokens a step, rates from 5e-5 on make the BF16 loss itself jump by several units
    # (gradient norms of 50 to 130), and then any two runs part for a while, however small their first difference.
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--name", default=None, help="of the JSON result (default: train-N-ranks)")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_text(folder / "stdlib", f"bpe:{arguments.vocabulary}", ["stdlib"])
        runs = [run(config, str(folder / "stdlib"), folder, arguments) for config in arguments.configs]
    base = runs[0]
    for one in runs:
        one["step_time_ratio"] = one["step_ms"] / base["step_ms"]
        one["peak_memory_ratio"] = one["peak_memory_gib"] / base["peak_memory_gib"]
        gaps = [abs(a - b) / b for a, b in zip(one["losses"], base["losses"], strict=True)]
        one["largest_loss_gap"], one["final_loss_gap"] = max(gaps), gaps[-1]
        last, last_base = (sum(r["losses"][-10:]) / len(r["losses"][-10:]) for r in (one, base))
        one["last_ten_loss_gap"] = last / last_base - 1
        print(
            f"{one['config']:<14} step {one['step_ms']:8.1f} ms ({one['step_time_ratio']:.2f}x)  "
            f"{one['tokens_per_second_per_gpu']:9,.0f} tokens/s/GPU  peak {one['peak_memory_gib']:6.1f} GiB "
            f"({one['peak_memory_ratio']:.2f}x)  loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f} "
            f"(gap: largest {one['largest_loss_gap']:.2%}, mean of the last ten {one['last_ten_loss_gap']:+.2%})"
        )
    name = arguments.name or f"train-{arguments.ranks}-rank{'s' if arguments.ranks > 1 else ''}"
    print("wrote", write_result(f"speed/{name}", {"settings": options(arguments), "runs": runs}, arguments.output))


if __name__ == "__main__":
    main()
