"""What the FP8 flow does to training: the same run in BF16 and in variants of the flow, paired by seed and data.

    python -m benchmarks.flow_convergence [--steps 2000] [--seeds 0 1] [--variants exact quantized ...]

A Llama-shaped GPT of 64 M parameters reads Python source as bytes (this Python's standard library and the packages
installed beside it), 32 768 tokens a step, AdamW in all runs. Each run is `launch/pretrain.py` on one GPU; runs share
the visible GPUs, one a GPU at a time. Prints held-out losses and their gaps to BF16 of the same seed, and writes
`flow-convergence.json` after every run, so that what is finished is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from benchmarks.common import write_result

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["num_layers=9", "hidden_size=768", "ffn_hidden_size=2048", "num_attention_heads=12", "num_query_groups=12"]
SEQUENCE, MICRO_BATCH = 1024, 32
EVALUATION = 64  # micro-batches of held-out text: 2 M tokens
LAST = 200  # steps whose training losses are averaged

BF16 = "bf16"
VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "exact": {},
    "exact, e5m2 gradients": {"grad_format": "e5m2"},
    "quantized": {"forward": "quantized"},
    "fp8 attention": {"attention": "fp8"},
    "row scales": {"forward_scales": "row"},
}


def settings(variant: str) -> dict[str, Any]:
    config = json.loads((ROOT / "configs/deepspeed/zero2-bf16.json").read_text())
    config["train_micro_batch_size_per_gpu"] = MICRO_BATCH
    activation = VARIANTS[variant]
    return config if activation is None else config | {"coat": {"activation": activation}}


def prepare(folder: Path) -> str:
    """Bytes of Python sources; the prefix for --data."""
    prefix = folder / "python"
    command = [sys.executable, "-m", "launch.prepare_data", "--input", "stdlib", sysconfig.get_path("purelib")]
    command += ["--glob", "*.py", "--max-bytes", "150M", "--tokenizer", "bytes", "--output", str(prefix), "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)
    return str(prefix)


def train(variant: str, seed: int, gpu: str, data: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run on one GPU; its losses."""
    name = f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    config, out = folder / f"{name}.json", folder / name
    config.write_text(json.dumps(settings(variant)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command += ["launch/pretrain.py", "--deepspeed_config", str(config), "--model", "configs/models/tiny.json"]
    command += ["--model-override", *MODEL, f"seq_length={SEQUENCE}", "--data", data, "--output", str(out)]
    command += ["--seed", str(seed), "--train-steps", str(arguments.steps), "--lr", str(arguments.lr)]
    command += ["--warmup-steps", str(arguments.steps // 10), "--split", "960,40,0"]
    command += ["--eval-interval", str(arguments.steps), "--eval-steps", str(EVALUATION)]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    start = time.monotonic()
    with open(folder / f"{name}.log", "w") as log:
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [r["loss"] for r in records]
    return {
        "variant": variant,
        "seed": seed,
        "held_out_loss": records[-1]["valid_loss"],
        "last_training_losses": sum(losses[-LAST:]) / len(losses[-LAST:]),
        "losses": losses[:: max(1, len(losses) // 200)],
        "seconds": time.monotonic() - start,
    }


def gaps(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in order, with relative gaps to BF16 of the same seed where that has finished."""
    base = {r["seed"]: r for r in runs if r["variant"] == BF16}
    ordered = sorted(runs, key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"]))
    for run in ordered:
        for key in ("held_out_loss", "last_training_losses") if run["seed"] in base else ():
            run[f"{key}_gap"] = run[key] / base[run["seed"]][key] - 1
    return ordered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="the first is for all, others for two")
    parser.add_argument("--paired", nargs="+", default=[BF16, "exact"], help="variants run with every seed")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--data", default=None, help="prefix of prepared data (default: prepared here)")
    parser.add_argument("--output", default=None, help="folder of the JSON result (default: benchmarks/results)")
    arguments = parser.parse_args()
    jobs: Queue[tuple[str, int]] = Queue()
    for seed in arguments.seeds:
        for variant in arguments.variants:
            if seed == arguments.seeds[0] or variant in arguments.paired:
                jobs.put((variant, seed))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    shown = {k: v for k, v in vars(arguments).items() if k not in ("output", "data")}
    runs: list[dict[str, Any]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = arguments.data or prepare(folder)

        def work(gpu: str) -> None:
            while True:
                try:
                    variant, seed = jobs.get_nowait()
                except Empty:
                    return
                try:
                    run = train(variant, seed, gpu, data, folder, arguments)
                except subprocess.CalledProcessError as error:
                    log = sorted(folder.glob("*.log"), key=lambda f: f.stat().st_mtime)[-1]
                    print(f"{variant}, seed {seed}: exit {error.returncode}\n{log.read_text()[-2000:]}", flush=True)
                    continue
                with lock:
                    runs.append(run)
                    write_result("flow-convergence", {"settings": shown, "runs": gaps(runs)}, arguments.output)
                    print(f"{variant}, seed {seed}: {run['held_out_loss']:.5f} in {run['seconds']:.0f} s", flush=True)

        workers = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for run in gaps(runs):
        print(
            f"{run['variant']:<24} seed {run['seed']}  held-out {run['held_out_loss']:.5f} "
            f"({run.get('held_out_loss_gap', float('nan')):+.3%})  last {LAST} training losses "
            f"{run['last_training_losses']:.5f} ({run.get('last_training_losses_gap', float('nan')):+.3%})"
        )


if __name__ == "__main__":
    main()
