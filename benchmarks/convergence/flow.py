"""What the FP8 flow does to training: the same run in BF16 and in variants of the flow, paired by seed and data.

    python -m benchmarks.convergence.flow [--steps 2000] [--runs bf16:0 "row scales:0" ...] [--per-gpu 2]
    python -m benchmarks.convergence.flow --tiny --steps 20

A Llama-shaped GPT of 64 M parameters reads Python source as bytes (this Python's standard library and the packages
installed beside torch), 32 768 tokens a step, AdamW in all runs. Each run is `launch/pretrain.py` on one GPU (without
one, on the CPU); ``--per-gpu`` of them share a GPU. Runs start in the order of the list, the most important first. One
that fails is shown with the end of its log, and the others go on. With ``--budget`` what still runs after so many
seconds is stopped, and is shown but not compared. Writes `convergence/flow.json` (with ``--tiny``
`convergence/flow-tiny.json`) after every run, with some 200 of its training losses, rounded to 5 decimals; ``--extend``
begins with the runs of such a file, made with the same steps, learning rate and text.

A run is VARIANT:SEED:REPEAT. Repeat r has a learning rate that is larger by r parts in 10^5: what differs between
repeats is what rounding does to a run by chaos alone. The gap of a variant is the mean over seeds of the difference to
BF16 of the same seed, each a mean over repeats; its standard error comes from the spread of all repeats, pooled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.common import ROOT, argument_parser, options, python_path, write_result
from benchmarks.convergence.flow_data import FULL, HELD_OUT, TINY, Size, check_text, earlier, prepare, tokens
from benchmarks.convergence.flow_report import BF16, LAST, gaps, mean, report
from benchmarks.timing import median

VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "row scales": {"forward_scales": "row"},
    "tensor scales": {"forward_scales": "tensor"},
    "tensor scales, quantized": {"forward_scales": "tensor", "forward": "quantized"},
    "tensor scales, e5m2 gradients": {"forward_scales": "tensor", "grad_format": "e5m2"},
    "tensor scales, fp8 attention": {"forward_scales": "tensor", "attention": "fp8"},
}
"""The "activation" block of each, None for BF16 layers. Whether it is valid is seen when its run starts."""


class Job(NamedTuple):
    """One run."""

    variant: str
    seed: int
    repeat: int

    @classmethod
    def parse(cls, text: str) -> Job:
        """From "VARIANT:SEED:REPEAT"; repeat, or seed and repeat, are 0 where they are left out."""
        variant, *numbers = text.split(":")
        if variant not in VARIANTS or len(numbers) > 2 or not all(n.isdecimal() for n in numbers):
            known = ", ".join(map(repr, VARIANTS))
            raise argparse.ArgumentTypeError(f"got {text!r}, accepted: VARIANT:SEED:REPEAT, VARIANT one of {known}")
        seed, repeat = (*map(int, numbers), 0, 0)[:2]
        return cls(variant, seed, repeat)

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, repeat {self.repeat}"


RUNS = [Job(v, s, 0) for s in (0, 1) for v in (BF16, "row scales", "tensor scales")]
RUNS += [Job(v, s, r) for r in (1, 2) for s in (0, 1) for v in (BF16, "row scales")]
RUNS += [Job(v, 0, 0) for v in list(VARIANTS)[3:]]


class RunFailed(Exception):
    """A run that left nothing to compare; the message holds the end of its log."""


def settings(variant: str, size: Size) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    config = json.loads((ROOT / "configs/deepspeed/zero2-bf16.json").read_text())
    config["train_micro_batch_size_per_gpu"] = size.micro_batch
    activation = VARIANTS[variant]
    return config if activation is None else config | {"coat": {"activation": activation}}


def command(job: Job, data: str, config: Path, out: Path, arguments: argparse.Namespace) -> list[str]:
    size, steps = TINY if arguments.tiny else FULL, arguments.steps
    lr = arguments.lr * (1 + 1e-5 * job.repeat)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    line += ["launch/pretrain.py", "--deepspeed_config", str(config), "--model", "configs/models/tiny.json"]
    line += ["--model-override", *size.model, f"seq_length={size.sequence}", "--data", data, "--output", str(out)]
    line += ["--seed", str(job.seed), "--train-steps", str(steps), "--lr", repr(lr), "--warmup-steps", str(steps // 10)]
    held_out = round(1000 * HELD_OUT)
    line += ["--split", f"{1000 - held_out},{held_out},0", "--data-cache", f"{out}.cache"]
    return line + ["--eval-interval", str(steps), "--eval-steps", str(size.evaluation)]


def stop(process: subprocess.Popen) -> None:
    """Kill the launcher and all that it started: its ranks are in sessions of their own, where no killpg finds them."""
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        launcher.suspend()  # so that it starts nothing between the look and the end
        for one in (*launcher.children(recursive=True), launcher):
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def train(
    job: Job,
    gpu: str,
    data: str,
    folder: Path,
    arguments: argparse.Namespace,
    seconds: float | None,
    wait: Callable[[subprocess.Popen, float | None], int] = subprocess.Popen.wait,
) -> dict[str, Any]:
    """One run on one GPU, stopped after ``seconds``, which is when ``wait`` raises TimeoutExpired; its losses.

    Raises:
        RunFailed: it ended early by itself, or was stopped before its first step.
    """
    name = f"{job.variant.replace(', ', '-').replace(' ', '-')}-{job.seed}-{job.repeat}"
    config, out, log = folder / f"{name}.json", folder / name, folder / f"{name}.log"
    config.write_text(json.dumps(settings(job.variant, TINY if arguments.tiny else FULL)))
    environment = {
        "OMP_NUM_THREADS": "4",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "PYTHONPATH": python_path(ROOT),
    }
    start, status = time.monotonic(), None
    with open(log, "w") as output:
        line = command(job, data, config, out, arguments)
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                status = wait(process, seconds)
        finally:
            if process.poll() is None:
                stop(process)
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if status or not records:
        why = "stopped by --budget before its first step" if status is None else f"exit {status}"
        raise RunFailed(f"{why}, after {len(records)} steps\n{log.read_text()[-3000:]}")
    losses = [r["loss"] for r in records]
    return {
        **job._asdict(),
        "steps": len(records),
        "held_out_loss": records[-1].get("valid_loss"),
        "last_training_losses": mean(losses[-LAST:]),
        "losses": [round(loss, 5) for loss in losses[:: max(1, len(losses) // 200)]],
        "seconds": time.monotonic() - start,
        "step_seconds": median([r["step_time"] for r in records]),
    }


class Study:
    """Runs that wait, those that are done and those that failed; threads take one after the other."""

    def __init__(
        self,
        todo: Sequence[Job],
        extended: dict[str, Any] | None,
        data: str,
        folder: Path,
        arguments: argparse.Namespace,
    ) -> None:
        self.data, self.folder, self.arguments = data, folder, arguments
        self.began = time.monotonic()
        self.text = tokens(data, TINY if arguments.tiny else FULL, arguments.steps)
        self.extended = extended
        if extended is not None:
            check_text(arguments.extend, extended, self.text["tokens"])
        self.runs = list(extended["runs"]) if extended else []
        self.failed: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._queue: Queue[Job] = Queue()
        for job in todo:
            self._queue.put(job)

    def work(self, gpu: str) -> None:
        """Do runs on one GPU until none is left."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            left = None
            if self.arguments.budget is not None:
                left = max(0.0, self.arguments.budget - (time.monotonic() - self.began))
            try:
                run = train(job, gpu, self.data, self.folder, self.arguments, left)
            except Exception as problem:  # whatever it is, the other runs go on
                text = str(problem) if isinstance(problem, RunFailed) else repr(problem)
                with self._lock:
                    self.failed.append({**job._asdict(), "why": text.splitlines()[0]})
                    print(f"{job}: {text}", flush=True)
            else:
                with self._lock:
                    self.runs.append(run)
                    speed = f"{run['steps']} steps in {run['seconds']:.0f} s, {1e3 * run['step_seconds']:.0f} ms each"
                    print(f"{job}: {speed}, held-out loss {run['held_out_loss']}", flush=True)
            with self._lock:
                self.write()

    def write(self) -> None:
        runs = sorted(self.runs, key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"], r["repeat"]))
        compared = gaps(runs, self.arguments.steps)
        chosen = options(self.arguments, "runs")
        found = {"settings": chosen, "data": self.text, "gaps": compared, "runs": runs, "failed": self.failed}
        if self.extended is not None:
            kept = ("environment", "settings", "note", "extended")
            found["extended"] = {k: self.extended[k] for k in kept if k in self.extended}
        write_result("convergence/flow" + "-tiny" * self.arguments.tiny, found, self.arguments.output)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", nargs="+", type=Job.parse, default=RUNS, metavar="VARIANT:SEED:REPEAT")
    parser.add_argument("--extend", type=Path, metavar="JSON", help="a result whose runs count with the new ones")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--per-gpu", type=int, default=1, metavar="N", help="runs that share a GPU")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop what still runs after so many")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, to try the program")
    parser.add_argument("--data", default=None, help="prefix of prepared data (default: prepared here)")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    extended = earlier(arguments.extend, vars(arguments), VARIANTS) if arguments.extend else None
    there = {(r["variant"], r["seed"], r["repeat"]) for r in (extended["runs"] if extended else ())}
    todo = [job for job in dict.fromkeys(arguments.runs) if job not in there]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())] or [""]
    with tempfile.TemporaryDirectory() as temporary:
        start = time.monotonic()
        data = arguments.data or prepare(Path(temporary), TINY if arguments.tiny else FULL)
        study = Study(todo, extended, data, Path(temporary), arguments)
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
    report(study.runs, study.failed, arguments.steps)


if __name__ == "__main__":
    main()
