"""Losses of one training on several layouts of the same GPUs: tensor-parallel ranks and ZeRO stages, beside TP 1.

    python -m benchmarks.convergence.layouts --ranks 4

A Llama-shaped GPT of 64 M parameters on Python sources, with optimizer and flow; every layout has the same batches and
initial weights, and sequence parallelism where it has tensor parallelism. Prints the largest difference of a step's
loss from that of the first layout and the difference of the last ten, writes `convergence/layouts-N-ranks.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.arguments import positive_float, positive_int
from benchmarks.common import ROOT, argument_parser, loss_gaps, options, write_result
from benchmarks.convergence.flow_data import FULL, TINY, Size, prepare
from benchmarks.convergence.runs import RunFailed, completed, torchrun

__all__ = ["Layout", "compared", "configuration"]


class Layout(NamedTuple):
    """How ranks share the work; the rest of them are data-parallel."""

    tp: int
    stage: int

    @classmethod
    def of(cls, text: str) -> Layout:
        """From "tp2-zero1"."""
        if (found := re.fullmatch(r"tp(\d+)-zero([12])", text)) is None or not int(found[1]):
            raise argparse.ArgumentTypeError(f"got {text!r}, accepted: tpN-zero1 or tpN-zero2")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"tp{self.tp}-zero{self.stage}"


def configuration(layout: Layout, size: Size, batch: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a layout; steps have the same samples in all of them."""
    found = json.loads((ROOT / f"configs/deepspeed/zero{layout.stage}.json").read_text())
    del found["gradient_accumulation_steps"]
    return found | {"train_batch_size": batch, "train_micro_batch_size_per_gpu": size.micro_batch}


def train(layout: Layout, data: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The losses of a run.

    Raises:
        RunFailed: it ended early; the message holds the end of its log.
    """
    size, out, log = TINY if arguments.tiny else FULL, folder / str(layout), folder / f"{layout}.log"
    config, batch = folder / f"{layout}.json", arguments.ranks * size.micro_batch
    config.write_text(json.dumps(configuration(layout, size, batch)))
    line = ["--deepspeed_config", str(config), "--model", "configs/models/tiny.json", "--model-override", *size.model]
    line += [f"seq_length={size.sequence}", "--data", data, "--output", str(out), "--data-cache", f"{out}.cache"]
    line += ["--train-steps", str(arguments.steps), "--lr", repr(arguments.lr), "--seed", str(arguments.seed)]
    line += ["--warmup-steps", str(arguments.steps // 10), "--tensor-parallel", str(layout.tp)]
    line += ["--sequence-parallel"] if layout.tp > 1 else []
    command = torchrun("launch/pretrain.py", *line, ranks=arguments.ranks)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(arguments.ranks))))
    try:
        records = completed(command, out, log, gpus)
    except RunFailed as failed:
        raise RunFailed(f"{layout}: {failed}") from None
    return {"layout": str(layout), "losses": [r["loss"] for r in records]}


def compared(one: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A run with its relative differences from ``base``: the largest of a step, and that of the last steps' mean."""
    gaps = loss_gaps(one["losses"], base["losses"])
    return one | {name: gaps[name] for name in ("largest_loss_gap", "last_ten_loss_gap")}


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=positive_int, default=4)
    parser.add_argument(
        "--layouts", nargs="+", type=Layout.of, default=None, metavar="tpN-zeroS", help="the first is the baseline"
    )
    parser.add_argument("--steps", type=positive_int, default=200)
    parser.add_argument("--lr", type=positive_float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1 M parameters, to try the program")
    arguments = parser.parse_args(given)
    if arguments.layouts is None:
        every = Layout(1, 2), Layout(2, 2), Layout(4, 1)
        arguments.layouts = [one for one in every if arguments.ranks % one.tp == 0]
    for one in arguments.layouts:
        if arguments.ranks % one.tp:
            parser.error(f"--layouts: got {one} for {arguments.ranks} ranks, accepted: a divisor of --ranks")
    return arguments


def main() -> None:
    arguments = parse()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = prepare(folder, TINY if arguments.tiny else FULL)
        for layout in arguments.layouts:
            one = train(layout, data, folder, arguments)
            found.append(compared(one, found[0] if found else one))
            print(
                f"{layout!s:<10} loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}, largest gap "
                f"{found[-1]['largest_loss_gap']:.2%}, mean of the last ten {found[-1]['last_ten_loss_gap']:+.3%}",
                flush=True,
            )
    settings = options(arguments) | {"layouts": [str(one) for one in arguments.layouts]}
    name = f"convergence/layouts-{arguments.ranks}-ranks" + "-tiny" * arguments.tiny
    print("wrote", write_result(name, {"settings": settings, "runs": found}, arguments.output))


if __name__ == "__main__":
    main()
