"""What the FP8 flow does to training: the same run in BF16 and in variants of the flow, paired by seed and data.

    python -m benchmarks.flow_convergence [--steps 2000] [--seeds 0 1] [--variants exact quantized ...] [--per-gpu 2]
    python -m benchmarks.flow_convergence --tiny --steps 20

A Llama-shaped GPT of 64 M parameters reads Python source as bytes (this Python's standard library and the packages
installed beside torch), 32 768 tokens a step, AdamW in all runs. Each run is `launch/pretrain.py` on one GPU (without
one, on the CPU); ``--per-gpu`` of them share a GPU. Runs start in the order of the list, the most important first. One
that fails is shown with the end of its log, and the others go on. With ``--budget`` what still runs after so many
seconds is stopped and counts as far as it got. Prints held-out losses and their gaps to BF16 of the same seed, and
writes `flow-convergence.json` after every run, so that what is finished is kept.

"bf16, nudged" is BF16 with a learning rate that is larger by one part in 10^5: its gap is what rounding does to a run
by chaos alone. A gap of that size says nothing about the variant that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch

from benchmarks.common import write_result

ROOT = Path(__file__).resolve().parent.parent
LAST = 200
"""Steps whose training losses are averaged: the last ones that a run and the one it is compared with both have."""
HELD_OUT = 0.04
"""Share of the data that is not trained on."""

BF16, NUDGED = "bf16", "bf16, nudged"
VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "exact": {},
    "row scales": {"forward_scales": "row"},
    "quantized": {"forward": "quantized"},
    "exact, e5m2 gradients": {"grad_format": "e5m2"},
    "fp8 attention": {"attention": "fp8"},
    NUDGED: None,
}
"""The "activation" block of each, None for BF16 layers. Whether it is valid is seen when its run starts."""


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    model: tuple[str, ...]
    sequence: int
    micro_batch: int
    evaluation: int
    """Micro-batches of held-out text."""
    max_bytes: str


FULL = Size(
    ("num_layers=9", "hidden_size=768", "ffn_hidden_size=2048", "num_attention_heads=12", "num_query_groups=12"),
    sequence=1024, micro_batch=32, evaluation=64, max_bytes="100M",
)  # fmt: skip
TINY = Size(
    ("num_layers=2", "hidden_size=64", "ffn_hidden_size=192", "num_attention_heads=2", "num_query_groups=2"),
    sequence=64, micro_batch=4, evaluation=4, max_bytes="1M",
)  # fmt: skip


class RunFailed(Exception):
    """A run that left nothing to compare; the message holds the end of its log."""


def settings(variant: str, size: Size) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    config = json.loads((ROOT / "configs/deepspeed/zero2-bf16.json").read_text())
    config["train_micro_batch_size_per_gpu"] = size.micro_batch
    activation = VARIANTS[variant]
    return config if activation is None else config | {"coat": {"activation": activation}}


def prepare(folder: Path, size: Size) -> str:
    """Bytes of Python sources; the prefix for --data."""
    prefix, packages = folder / "python", Path(torch.__file__).parents[1]
    command = [sys.executable, "-m", "launch.prepare_data", "--input", "stdlib", str(packages), "--glob", "*.py"]
    command += ["--max-bytes", size.max_bytes, "--tokenizer", "bytes", "--output", str(prefix), "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)
    return str(prefix)


def tokens(data: str, size: Size, steps: int) -> dict[str, Any]:
    """What there is to read and what a run reads. Samples beyond the first epoch are the same ones in another order."""
    there = json.loads(Path(f"{data}.json").read_text())["tokens"]
    trained, held_out = (n * size.sequence * size.micro_batch for n in (steps, size.evaluation))
    return {
        "tokens": there,
        "training_tokens": trained,
        "training_epochs": trained / (there * (1 - HELD_OUT)),
        "held_out_tokens": held_out,
        "held_out_epochs": held_out / (there * HELD_OUT),
    }


def command(variant: str, seed: int, data: str, config: Path, out: Path, arguments: argparse.Namespace) -> list[str]:
    size, steps = TINY if arguments.tiny else FULL, arguments.steps
    lr = arguments.lr * (1 + 1e-5) if variant == NUDGED else arguments.lr
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    line += ["launch/pretrain.py", "--deepspeed_config", str(config), "--model", "configs/models/tiny.json"]
    line += ["--model-override", *size.model, f"seq_length={size.sequence}", "--data", data, "--output", str(out)]
    line += ["--seed", str(seed), "--train-steps", str(steps), "--lr", repr(lr), "--warmup-steps", str(steps // 10)]
    held_out = round(1000 * HELD_OUT)
    line += ["--split", f"{1000 - held_out},{held_out},0", "--data-cache", f"{out}.cache"]
    return line + ["--eval-interval", str(steps), "--eval-steps", str(size.evaluation)]


def train(
    variant: str, seed: int, gpu: str, data: str, folder: Path, arguments: argparse.Namespace, seconds: float | None
) -> dict[str, Any]:
    """One run on one GPU, stopped after ``seconds``; its losses.

    Raises:
        RunFailed: it ended early by itself, or was stopped before its first step.
    """
    name = f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}"
    config, out, log = folder / f"{name}.json", folder / name, folder / f"{name}.log"
    config.write_text(json.dumps(settings(variant, TINY if arguments.tiny else FULL)))
    environment = {
        "OMP_NUM_THREADS": "4",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    start, status = time.monotonic(), None
    with open(log, "w") as output:
        line = command(variant, seed, data, config, out, arguments)
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the launcher and its rank, both in a session of their own
                process.wait()
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if status or not records:
        why = "stopped by --budget before its first step" if status is None else f"exit {status}"
        raise RunFailed(f"{why}, after {len(records)} steps\n{log.read_text()[-3000:]}")
    return {
        "variant": variant,
        "seed": seed,
        "steps": len(records),
        "held_out_loss": records[-1].get("valid_loss"),
        "losses": [r["loss"] for r in records],
        "seconds": time.monotonic() - start,
        "step_seconds": sorted(r["step_time"] for r in records)[len(records) // 2],
    }


def gaps(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in order, with relative gaps to BF16 of the same seed where there is one: of the held-out loss, and of
    the training losses of the last :data:`LAST` steps that both have. Of all losses, 200 are kept."""
    base = {r["seed"]: r for r in runs if r["variant"] == BF16}
    found = []
    for run in sorted(runs, key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"])):
        losses = run["losses"]
        row = {**run, "losses": losses[:: max(1, len(losses) // 200)], "last_training_losses": _mean(losses[-LAST:])}
        if (bf16 := base.get(run["seed"])) is not None:
            both = min(len(losses), len(bf16["losses"]))
            mine, its = (_mean(r["losses"][max(0, both - LAST) : both]) for r in (run, bf16))
            row |= {"compared_at_step": both, "last_training_losses_gap": mine / its - 1}
            if run["held_out_loss"] is not None and bf16["held_out_loss"] is not None:
                row["held_out_loss_gap"] = run["held_out_loss"] / bf16["held_out_loss"] - 1
        found.append(row)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def jobs(variants: Sequence[str], seeds: Sequence[int], paired: Sequence[str]) -> list[tuple[str, int]]:
    """Variant and seed of each run: first those run with every seed, seed by seed; then the others, with the first."""
    both = [v for v in variants if v in paired]
    return [(v, s) for s in seeds for v in both] + [(v, seeds[0]) for v in variants if v not in both]


class Study:
    """Runs that wait, those that are done and those that failed; threads take one after the other."""

    def __init__(self, todo: Sequence[tuple[str, int]], data: str, folder: Path, arguments: argparse.Namespace) -> None:
        self.data, self.folder, self.arguments = data, folder, arguments
        self.began = time.monotonic()
        self.text = tokens(data, TINY if arguments.tiny else FULL, arguments.steps)
        self.runs: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._queue: Queue[tuple[str, int]] = Queue()
        for job in todo:
            self._queue.put(job)

    def work(self, gpu: str) -> None:
        """Do runs on one GPU until none is left."""
        while True:
            try:
                variant, seed = self._queue.get_nowait()
            except Empty:
                return
            left = None
            if self.arguments.budget is not None:
                left = max(0.0, self.arguments.budget - (time.monotonic() - self.began))
            try:
                run = train(variant, seed, gpu, self.data, self.folder, self.arguments, left)
            except Exception as problem:  # whatever it is, the other runs go on
                text = str(problem) if isinstance(problem, RunFailed) else repr(problem)
                with self._lock:
                    self.failed.append({"variant": variant, "seed": seed, "why": text.splitlines()[0]})
                    print(f"{variant}, seed {seed}: {text}", flush=True)
            else:
                with self._lock:
                    self.runs.append(run)
                    print(
                        f"{variant}, seed {seed}: {run['steps']} steps in {run['seconds']:.0f} s, "
                        f"{1e3 * run['step_seconds']:.0f} ms each, held-out loss {run['held_out_loss']}",
                        flush=True,
                    )
            with self._lock:
                self.write()

    def write(self) -> None:
        shown = {k: v for k, v in vars(self.arguments).items() if k not in ("output", "data")}
        found = {"settings": shown, "data": self.text, "runs": gaps(self.runs), "failed": self.failed}
        write_result("flow-convergence", found, self.arguments.output)

    def report(self) -> None:
        """The table, and what is missing in it."""
        nan = float("nan")
        for run in gaps(self.runs):
            held_out = nan if run["held_out_loss"] is None else run["held_out_loss"]
            print(
                f"{run['variant']:<24} seed {run['seed']}  held-out {held_out:.5f} "
                f"({run.get('held_out_loss_gap', nan):+.3%})  last {LAST} training losses "
                f"{run['last_training_losses']:.5f} ({run.get('last_training_losses_gap', nan):+.3%} at step "
                f"{run.get('compared_at_step', run['steps'])})  {run['seconds']:.0f} s"
            )
        for run in self.failed:
            print(f"{run['variant']:<24} seed {run['seed']}  FAILED: {run['why']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="the first for all, others for --paired")
    parser.add_argument("--paired", nargs="*", default=[BF16, "exact"], help="variants run with every seed")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--per-gpu", type=int, default=1, metavar="N", help="runs that share a GPU")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop what still runs after so many")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, to try the program")
    parser.add_argument("--data", default=None, help="prefix of prepared data (default: prepared here)")
    parser.add_argument("--output", default=None, help="folder of the JSON result (default: benchmarks/results)")
    arguments = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())] or [""]
    todo = jobs(arguments.variants, arguments.seeds, arguments.paired)
    with tempfile.TemporaryDirectory() as temporary:
        start = time.monotonic()
        data = arguments.data or prepare(Path(temporary), TINY if arguments.tiny else FULL)
        study = Study(todo, data, Path(temporary), arguments)
        print(
            f"{len(todo)} runs on {len(gpus)} devices, {arguments.per_gpu} at a time on each; data in "
            f"{time.monotonic() - start:.0f} s: {study.text['tokens']:,} tokens, of which a run trains on "
            f"{study.text['training_tokens']:,} ({study.text['training_epochs']:.2f} epochs) and holds out "
            f"{study.text['held_out_tokens']:,} ({study.text['held_out_epochs']:.2f} epochs)",
            flush=True,
        )
        # Slot by slot, so that the first runs spread over the GPUs.
        slots = [gpu for _ in range(arguments.per_gpu) for gpu in gpus]
        workers = [threading.Thread(target=study.work, args=(gpu,)) for gpu in slots]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    study.report()


if __name__ == "__main__":
    main()
