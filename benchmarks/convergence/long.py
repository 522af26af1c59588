"""A longer run in BF16 and with the whole of coat, optimizer and flow together: 303 M parameters,
315 M tokens.

    python -m benchmarks.convergence.long --folder DIR --budget 560
    python -m benchmarks.convergence.long_report --plot docs/figures/convergence-long.png

The same command, given again on the same machine, goes on: text, checkpoints and metrics are in
DIR, and after ``--budget`` seconds (20 are kept for saving) both runs are told to save and
leave. Both run at the same time, each on half of the GPUs, on a power of two of them; on a single
GPU they share it. Writes `convergence/long.json`, with ``--seed 1`` `long-seed-1.json`, after each
call: losses, held-out losses, speed and memory up to the step reached.

What two runs of one seed differ by anyway, and which part a gap is of: ``--runs 'bf16 again' 'coat
again' flow moments --name long-parts``, runs with a learning rate that is larger by 1e-5, and of
the flow and of FP8 moments alone.

A Llama-shaped GPT of 21 layers and 1024 hidden units, 1200 steps of 262 144 tokens, cosine
schedule. The text is what a machine without a network has: Python sources of the standard library,
of the packages beside torch and of folders named by ``--text``, as tokens of a BPE that is learnt
from them. Where that is less than 315 M tokens, it is read again in another order; the result says
how often (``--tokenizer bytes`` has nearly four times the tokens). 2 % of the documents are held
out.

What it costs: 6e17 floating-point operations a run, 17 minutes of two H200s in BF16 if they make
300 TFLOP/s each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from benchmarks.arguments import argument_parser, positive_float, positive_int
from benchmarks.common import options, prepare_text, write_result
from benchmarks.convergence.flow import BF16, FP8_MOMENTS, NUDGE, TINY, Size, settings
from benchmarks.convergence.runs import devices, launched, records_of, torchrun
from benchmarks.timing import median

PAIR = BF16, "coat"
VARIANTS = {
    BF16: BF16,
    "coat": FP8_MOMENTS[-1],
    "bf16 again": BF16,
    "coat again": FP8_MOMENTS[-1],
    "flow": "row scales",
    "moments": FP8_MOMENTS[0],
}
"""Names of the runs, and the variants of `flow.py` that they are."""
LONG = Size(
    (
        "num_layers=21",
        "hidden_size=1024",
        "ffn_hidden_size=2816",
        "num_attention_heads=16",
        "num_query_groups=16",
    ),
    sequence=1024,
    micro_batch=32,
    evaluation=16,
    max_bytes="4G",
)
BATCH = 256, 4
"""Samples of a step, and those of ``--tiny``."""
SAVING = 20
"""Seconds of the budget that are kept for saving."""
POINTS = 240
"""Points of the curve in the result; each is a mean over several steps."""


def configuration(name: str, size: Size, batch: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run; steps have the same samples on any number of GPUs."""
    found = settings(VARIANTS[name], size) | {"train_batch_size": batch}
    del found["gradient_accumulation_steps"]
    return found


def command(
    name: str, data: str, folder: Path, ranks: int, arguments: argparse.Namespace
) -> list[str]:
    """What starts a run, or continues it."""
    a, size, out = arguments, TINY if arguments.tiny else LONG, folder / name
    config = folder / f"{name}.json"
    config.write_text(json.dumps(configuration(name, size, BATCH[a.tiny])))
    lr = a.lr * (1 + NUDGE * name.endswith("again"))
    line = f"--seed {a.seed} --train-steps {a.steps} --warmup-steps {a.steps // 10} --lr {lr!r}"
    line += f" --eval-interval {max(1, a.steps // 24)} --eval-steps {size.evaluation}"
    line += f" --save-interval {max(1, a.steps // 3)} --load auto --keep-last 1 --split 980,20,0"
    line += " --model configs/models/tiny.json --model-override"
    words = [*line.split(), *size.model, f"seq_length={size.sequence}"]
    words += ["--deepspeed_config", str(config), "--data", data, "--data-cache", f"{out}-index"]
    words += ["--output", str(out), "--save", f"{out}-saved"]
    return torchrun("launch/pretrain.py", *words, ranks=ranks)


def shares(gpus: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """The GPUs of each run: a power of two, or one that is shared where there are fewer than
    runs.
    """
    if len(gpus) < len(names):
        return [[gpus[i % len(gpus)]] for i in range(len(names))]
    each = 1 << (len(gpus) // len(names)).bit_length() - 1
    return [list(gpus[i * each : (i + 1) * each]) for i in range(len(names))]


def run(line: Sequence[str], log: Path, gpus: Sequence[str], seconds: float | None) -> int | None:
    """Start or continue a run; after ``seconds`` its ranks are asked to save and leave.

    Returns:
        The exit status; None where it was killed, because it had not saved a minute later.
    """
    with launched(line, log, ",".join(gpus)) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Not the launcher, which would not wait for the saving.
            for rank in psutil.Process(process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(60)
    return None


def curve(out: Path, batch: int, sequence: int) -> dict[str, Any]:
    """What the metrics of a run say of its steps so far."""
    records = records_of(out)
    if not records:
        return {"steps": 0}
    for record in records:
        # The step was skipped.
        record["loss"] = math.nan if record["loss"] is None else record["loss"]
    each = max(1, -(-records[-1]["step"] // POINTS))
    groups = [records[i : i + each] for i in range(0, len(records), each)]
    return {
        "steps": records[-1]["step"],
        "tokens": records[-1]["step"] * batch * sequence,
        "steps_a_point": each,
        "training_losses": [round(fmean(r["loss"] for r in g), 5) for g in groups],
        "held_out_steps": [r["step"] for r in records if "valid_loss" in r],
        "held_out_losses": [r["valid_loss"] for r in records if "valid_loss" in r],
        "step_seconds": median([r["step_time"] for r in records]),
        "seconds_in_steps": sum(r["step_time"] for r in records),
        "tokens_per_second_per_gpu": median([r["tokens_per_second_per_gpu"] for r in records]),
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in records),
        "skipped_steps": sum("skipped" in r for r in records),
    }


def prepare(folder: Path, arguments: argparse.Namespace) -> str:
    """The text as tokens; the prefix for --data. What is there from an earlier call is not made
    again.
    """
    prefix, tokenizer, learnt, most = folder / "text", arguments.tokenizer, "20M", LONG.max_bytes
    if arguments.tiny:
        tokenizer, learnt, most = "bpe:512", "1M", "1M"
    if not prefix.with_suffix(".json").exists():
        inputs = ["stdlib", str(Path(torch.__file__).parents[1]), *arguments.text]
        more = ["--glob", "*.py", "--train-bytes", learnt, "--max-bytes", most]
        prepare_text(prefix, tokenizer, inputs, *more)
    return str(prefix)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(
        __doc__, lr=6e-4, tokenizer="bpe:16384", data=None, name="long", tiny=False
    )
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="where text, checkpoints and metrics are and stay",
    )
    parser.add_argument(
        "--runs", nargs="+", choices=list(VARIANTS), default=list(PAIR), metavar="NAME"
    )
    parser.add_argument(
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="of a call; then runs save and leave",
    )
    parser.add_argument(
        "--steps", type=positive_int, help="of the whole run (default: 1200, --tiny: 6)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="PATH", help="more files or folders to read"
    )
    arguments = parser.parse_args(given)
    arguments.steps = arguments.steps or (6 if arguments.tiny else 1200)
    return arguments


def main() -> None:
    began, a = time.monotonic(), parse()
    a.folder = a.folder.resolve()
    a.folder.mkdir(parents=True, exist_ok=True)
    data = a.data or prepare(a.folder, a)
    text = json.loads(Path(f"{data}.json").read_text())
    print(f"data in {time.monotonic() - began:.0f} s: {text['tokens']:,} tokens", flush=True)
    gpus = devices()
    status: dict[str, int | None] = {}
    size = TINY if a.tiny else LONG

    def curves() -> dict[str, dict[str, Any]]:
        names = [name for name in VARIANTS if name in a.runs or (a.folder / name).exists()]
        return {name: curve(a.folder / name, BATCH[a.tiny], size.sequence) for name in names}

    before = curves()

    def go(name: str, mine: Sequence[str]) -> None:
        left = None
        if a.budget is not None:
            left = max(1.0, a.budget - SAVING - (time.monotonic() - began))
        line = command(name, data, a.folder, len(mine), a)
        status[name] = run(line, a.folder / f"{name}.log", mine, left)

    divided = shares(gpus, a.runs)
    workers = [threading.Thread(target=go, args=pair) for pair in zip(a.runs, divided, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = curves()
    for name, one in found.items():
        held_out = one.get("held_out_losses", [])[-1:]
        print(f"{name}: {one['steps']} of {a.steps} steps, held-out {held_out}", flush=True)
        if status.get(name, 0) != 0:
            log = (a.folder / f"{name}.log").read_text()[-3000:]
            print(f"{name}: exit {status[name]}\n{log}", flush=True)
    further = any(found[name]["steps"] > before[name]["steps"] for name in a.runs)
    if not further and any(one != 0 for one in status.values()):
        sys.exit("error: no run made a step; the result stays as it was")
    trained = a.steps * BATCH[a.tiny] * size.sequence
    result = {
        "settings": options(a, "text"),
        "data": {
            "tokens": text["tokens"],
            "bytes": text["text_bytes"],
            "epochs": trained / (0.98 * text["tokens"]),
        },
        "gpus_of_a_run": len(divided[0]),
        "runs": found,
    }
    name = f"convergence/{a.name}" + "-tiny" * a.tiny + f"-seed-{a.seed}" * (a.seed != 0)
    write_result(name, result, a.output, nan=True)


if __name__ == "__main__":
    main()
