"""What the FP8 flow does to training: the same run in BF16 and in variants of the flow, paired by seed and data.

    python -m benchmarks.convergence.flow [--steps 2000] [--runs bf16:0 "row scales:0" ...] [--per-gpu 2]
    python -m benchmarks.convergence.flow --tiny --steps 20

A Llama-shaped GPT of 64 M parameters reads Python source as bytes (this Python's standard library and the packages
installed beside torch), 32 768 tokens a step, AdamW in all runs. Each run is `launch/pretrain.py` on one GPU (without
one, on the CPU); ``--per-gpu`` of them share a GPU. Runs start in the order of the list, the most important first. One
that fails is shown with the end of its log, and the others go on. With ``--budget`` what still runs after so many
seconds is stopped, and is shown but not compared. Writes `convergence/flow.json` (with ``--tiny``
`convergence/flow-tiny.json`) after every run, with some 200 of its training losses, rounded to 5 decimals; ``--extend``
begins with the runs of such a file, made with the same steps, learning rate and text. A call in which no run comes to
its end leaves an earlier result as it is, and fails.

A run is VARIANT:SEED:REPEAT. Repeat r has a learning rate that is larger by r parts in 10^5: what differs between
repeats is what rounding does to a run by chaos alone. The gap of a variant is the mean over seeds of the difference to
BF16 of the same seed, each a mean over repeats; its standard error comes from the spread of all repeats, pooled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import one_line, positive_float, positive_int
from benchmarks.common import ROOT, argument_parser
from benchmarks.convergence import runs
from benchmarks.convergence.flow_data import FULL, HELD_OUT, TINY, Size, earlier, prepare, tokens
from benchmarks.convergence.flow_report import BF16, gaps, report
from benchmarks.convergence.runs import RunFailed, Wait, measured, torchrun

__all__ = ["FP8_MOMENTS", "FULL", "RUNS", "VARIANTS", "Job", "RunFailed", "Study", "pretrain", "settings", "tokens"]

VARIANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "row scales": {"forward_scales": "row"},
    "row scales, saved in e4m3": {"forward_scales": "row", "saved_format": "e4m3"},
    "tensor scales": {"forward_scales": "tensor"},
    "tensor scales, quantized": {"forward_scales": "tensor", "forward": "quantized"},
    "tensor scales, e5m2 gradients": {"forward_scales": "tensor", "grad_format": "e5m2"},
    "tensor scales, fp8 attention": {"forward_scales": "tensor", "attention": "fp8"},
    "fp8 moments": None,
    "fp8 moments, row scales": {"forward_scales": "row"},
}
"""The "activation" block of each, None for BF16 layers. Whether it is valid is seen when its run starts."""
FP8_MOMENTS = "fp8 moments", "fp8 moments, row scales"
"""Variants whose optimizer is CoatAdamW; the last is the project's default, optimizer and flow together."""


class Job(runs.Job):
    """One run of a variant of :data:`VARIANTS`."""

    @classmethod
    def parse(cls, text: str) -> Job:
        """From "VARIANT:SEED:REPEAT"; repeat, or seed and repeat, are 0 where they are left out."""
        return cls(*cls.of(text, VARIANTS))


RUNS = [Job(v, s, 0) for s in (0, 1) for v in (BF16, "row scales", "tensor scales")]
RUNS += [Job(v, s, r) for r in (1, 2) for s in (0, 1) for v in (BF16, "row scales")]
RUNS += [Job(v, 0, 0) for v in list(VARIANTS)[4:7]]


def settings(variant: str, size: Size) -> dict[str, Any]:
    """The DeepSpeed configuration of a run."""
    config = json.loads((ROOT / "configs/deepspeed/zero2-bf16.json").read_text())
    config["train_micro_batch_size_per_gpu"] = size.micro_batch
    activation = VARIANTS[variant]
    if variant in FP8_MOMENTS:
        config["optimizer"]["type"] = "CoatAdamW"
        activation = activation or {"enabled": False}
    return config if activation is None else config | {"coat": {"activation": activation}}


def pretrain(
    job: runs.Job, size: Size, data: str, config: Path, out: Path, arguments: argparse.Namespace, nudge: float = 1e-5
) -> list[str]:
    """The arguments of `launch/pretrain.py` for a whole run; ``nudge``: relative step of the learning rate a repeat."""
    steps, lr = arguments.steps, arguments.lr * (1 + nudge * job.repeat)
    line = ["--deepspeed_config", str(config), "--model", "configs/models/tiny.json"]
    line += ["--model-override", *size.model, f"seq_length={size.sequence}", "--data", data, "--output", str(out)]
    line += ["--seed", str(job.seed), "--train-steps", str(steps), "--lr", repr(lr), "--warmup-steps", str(steps // 10)]
    held_out = round(1000 * HELD_OUT)
    line += ["--split", f"{1000 - held_out},{held_out},0", "--data-cache", f"{out}.cache"]
    return line + ["--eval-interval", str(steps), "--eval-steps", str(size.evaluation)]


def command(job: Job, data: str, config: Path, out: Path, arguments: argparse.Namespace) -> list[str]:
    size = TINY if arguments.tiny else FULL
    return torchrun("launch/pretrain.py", *pretrain(job, size, data, config, out, arguments))


def train(
    job: Job,
    gpu: str,
    data: str,
    folder: Path,
    arguments: argparse.Namespace,
    seconds: float | None,
    wait: Wait | None = None,
) -> dict[str, Any]:
    """One run on one GPU; see :func:`benchmarks.convergence.runs.measured`."""
    config, out, log = (folder / f"{job.file_name}{end}" for end in (".json", "", ".log"))
    config.write_text(json.dumps(settings(job.variant, TINY if arguments.tiny else FULL)))
    line = command(job, data, config, out, arguments)
    return {**job._asdict(), **measured(line, out, log, gpu, seconds, wait)}


class Study(runs.Study):
    """Whole runs."""

    name = "convergence/flow"
    variants = VARIANTS

    def train(self, job: runs.Job, gpu: str) -> dict[str, Any]:
        return train(Job(*job), gpu, self.data, self.folder, self.arguments, self.left())

    def compared(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"gaps": gaps(runs, self.arguments.steps)}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", nargs="+", type=Job.parse, default=RUNS, metavar="VARIANT:SEED:REPEAT")
    parser.add_argument("--extend", type=Path, metavar="JSON", help="a result whose runs count with the new ones")
    parser.add_argument("--steps", type=positive_int, default=2000)
    parser.add_argument("--lr", type=positive_float, default=6e-4)
    parser.add_argument("--per-gpu", type=positive_int, default=1, metavar="N", help="runs that share a GPU")
    parser.add_argument("--budget", type=positive_float, metavar="SECONDS", help="stop what still runs after so many")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, to try the program")
    parser.add_argument("--data", default=None, help="prefix of prepared data (default: prepared here)")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with one_line():
        extended = earlier(arguments.extend, vars(arguments), VARIANTS) if arguments.extend else None
    there = {(r["variant"], r["seed"], r["repeat"]) for r in (extended["runs"] if extended else ())}
    todo = [job for job in dict.fromkeys(arguments.runs) if job not in there]
    with tempfile.TemporaryDirectory() as temporary:
        start = time.monotonic()
        data = arguments.data or prepare(Path(temporary), TINY if arguments.tiny else FULL)
        print(f"data in {time.monotonic() - start:.0f} s", flush=True)
        with one_line():
            study = Study(todo, extended, data, Path(temporary), arguments)
        study.work_on_all()
    report(study.runs, study.failed, arguments.steps)
    if (why := study.nothing()) is not None:
        sys.exit(why)


if __name__ == "__main__":
    main()
