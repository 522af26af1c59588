"""Writes docs/results.md from what the programs measured; ``--measure`` first measures what is missing or outdated.

    python -m benchmarks.results_page
    python -m benchmarks.results_page --measure [--seconds 540] [--peers DIR]        # or: make results PEERS=DIR

``results_page.md`` is the page's text; ``{{name}}`` in it is a table of :data:`TABLES`. A result whose code is not what
is here (``benchmarks.common.code_digest``) is said to be of earlier code, and is what ``--measure`` measures again, a
command after the other until ``--seconds`` are over: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, ROOT, argument_parser, code_digest
from benchmarks.speed import whole_report

__all__ = ["TABLES", "Table", "main", "page"]

TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs/results.md"
GIB = 2**30
Result = dict[str, Any]


class Table(NamedTuple):
    """One table of the page."""

    results: dict[str, tuple[str, ...]]
    """Files in ``benchmarks/results/speed`` without their suffix, and the commands that measure each; PEERS in them is
    ``--peers``."""
    render: Callable[..., list[str]]
    """Markdown lines of the files' contents, in their order."""
    goes_on: bool = False
    """The program itself knows what is left to be measured."""
    on: str = ""
    """Part of the name of the GPU that the table is about; "" = any."""


def rows(head: str, lines: Sequence[str]) -> list[str]:
    """A Markdown table."""
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {line} |" for line in lines)]


def percent(value: float) -> str:
    """0.19 %, with a minus sign where there is one."""
    return f"{100 * value:.2f} %".replace("-", "\u2212")


def number(value: float, digits: int = 0) -> str:
    """With thin groups of three: 35 819."""
    return f"{value:,.{digits}f}".replace(",", " ")


def train(found: Result) -> list[str]:
    lines = []
    for one in found["runs"]:
        held, base = one["memory"], one is found["runs"][0]
        moments = held["optimizer moments"]["bytes"] / held["optimizer moments"]["elements"]
        gaps = f"{percent(one['largest_loss_gap'])} | {percent(one['last_ten_loss_gap'])}"
        lines.append(
            f"{'BF16, torch AdamW' if base else 'coat'} | {one['step_ms']:.1f} ms | "
            f"{number(one['tokens_per_second_per_gpu'])} | {moments:.3f} | "
            f"{held['activations']['bytes'] / GIB:.2f} GiB | {one['peak_memory_gib']:.1f} GiB | "
            + (" | " if base else gaps)
        )
    head = (
        " | step | tokens/s/GPU | moments, B/param | saved for backward | peak | largest loss gap | mean gap, last ten"
    )
    return rows(head, lines)


def train_tp(found: Result) -> list[str]:
    lines = []
    for size in dict.fromkeys(one["micro_batch"] for one in found["runs"]):
        of = {one["config"]: one for one in found["runs"] if one["micro_batch"] == size}
        cells = [
            f"{number(one['tokens_per_second_per_gpu'])} ({one['tokens_per_second_ratio']:.3f})" for one in of.values()
        ]
        lines.append(f"{size} | " + " | ".join(cells))
    return rows("micro-batch | " + " | ".join(dict.fromkeys(one["config"] for one in found["runs"])), lines)


def pipeline(found: Result) -> list[str]:
    runs, kinds = found["runs"], [(k, v) for k in ("BF16", "coat") for v in (1, 2)]
    of = {(one["micro_batches"], one["layers"], one["virtual_stages"]): one["ratio"] for one in runs}
    lines = [
        f"{m} | " + " | ".join(f"{of[m, k, v]:.3f}" if (m, k, v) in of else "" for k, v in kinds)
        for m in dict.fromkeys(one["micro_batches"] for one in runs)
    ]
    return rows("micro-batches | BF16, 1F1B | BF16, V = 2 | coat, 1F1B | coat, V = 2", lines)


def layer(found: Result) -> list[str]:
    lines = []
    for one in found["results"]:
        for name in ("TE bf16", "TE fp8 delayed", *(n for n in one["runs"] if n.startswith("coat"))):
            if (run := one["runs"].get(name)) is not None:
                ratio = f"{run['ratio_to_te_bf16']:.3f}" if "ratio_to_te_bf16" in run else ""
                lines.append(f"{name} | {run['ms']:.2f} ms | {ratio} | {number(run['saved_bytes_per_token'])}")
    return rows(" | forward + backward | to Transformer Engine BF16 | saved, B/token", lines)


def layers(over_ranks: Result, experts: Result) -> list[str]:
    lines = []
    for one in over_ranks["results"]:
        runs = one["runs"]
        what = f"{one['preset']}, two GPUs, TP 2 with sequence parallelism"
        lines.append(
            f"{what} | {runs['bf16']['ms']:.2f} ms | {runs['coat']['ms']:.2f} ms | {runs['coat']['ratio_to_bf16']:.3f}"
        )
    for one in experts["results"]:
        if one["tokens"] == 16384:
            base, ours = one["runs"]["grouped bf16"], one["runs"]["grouped coat"]
            what = f"{one['shape']}, grouped products, one GPU"
            lines.append(f"{what} | {base['ms']:.2f} ms | {ours['ms']:.2f} ms | {ours['ratio_to_bf16']:.3f}")
    return rows("layer | BF16 | coat | ratio", lines)


def optimizer(found: Result) -> list[str]:
    pairs: dict[str, list[Result]] = {}
    for one in found["steps"]:
        pairs.setdefault(number(one["parameters"]), []).append(one)
    pairs["300 tensors, 52 M"] = found["model_of_300_tensors"]
    lines = []
    for size, both in pairs.items():
        of = {one["optimizer"]: one for one in both}
        ours, torchs = of["CoatAdamW"], of["torch fused AdamW"]
        share = f"{ours['fraction_of_copy_bandwidth']:.0%}" if "fraction_of_copy_bandwidth" in ours else ""
        lines.append(
            f"{size} | {torchs['ms']:.2f} ms | {ours['ms']:.2f} ms | {share} | {ours['ratio_to_torch_fused']:.2f}"
        )
    return rows("parameters | torch fused AdamW | `CoatAdamW` | of copy bandwidth | ratio", lines)


def engine_step(found: Result) -> list[str]:
    return rows(
        " | `engine.step()` | ratio",
        [f"{s['optimizer']} | {s['step_ms']:.1f} ms | {s['ratio']:.3f}" for s in found["steps"]],
    )


def whole(found: Result) -> list[str]:
    return whole_report.report(whole_report.groups(found["cases"]))


RUN = "-m benchmarks.speed."
TWO = "-m torch.distributed.run --standalone --nproc_per_node 2 " + RUN
PEERS_7B = "layer --variants coat 'coat saved in e4m3' --name "
TABLES = {
    "train": Table({"train-2-ranks": (RUN + "train --ranks 2",)}, train),
    "layer": Table({"layer-peers-7b": (RUN + PEERS_7B + "layer-peers-7b PEERS",)}, layer),
    "layers": Table(
        {
            "tp-layer": (TWO + "tp_layer --variants coat 'coat over NCCL' PEERS",),
            "experts": (RUN + "experts --kernels 0",),
        },
        layers,
    ),
    "train_tp": Table(
        {
            "train-tp-2": (
                RUN + "train --ranks 2 --tensor-parallel 2 --micro-batch 2 4 --steps 26 --name train-tp-2 "
                "--configs 'TE bf16' zero2 'zero2 over NCCL' PEERS",
            )
        },
        train_tp,
    ),
    "engine_step": Table({"engine-step-zero2-2-ranks": (TWO + "engine_step",)}, engine_step),
    "optimizer": Table({"optimizer": (RUN + "optimizer",)}, optimizer),
    "pipeline": Table({"pipeline-2-stages": (TWO + "pipeline",)}, pipeline),
    "whole": Table(
        {
            "whole": (
                RUN + "whole --ranks 2 PEERS",
                RUN + "whole --ranks 2 --gpu-memory 80 PEERS",
                RUN + "whole --ranks 1 PEERS",
                RUN + "whole --ranks 1 --gpu-memory 80 --models llama2-7b PEERS",
            )
        },
        whole,
        goes_on=True,
    ),
    "h100_layer": Table({"layer-h100": (RUN + PEERS_7B + "layer-h100 PEERS",)}, layer, on="H100"),
    "h100_optimizer": Table({"optimizer-h100": (RUN + "optimizer --name optimizer-h100",)}, optimizer, on="H100"),
    "h100_whole": Table(
        {"whole-h100": (RUN + "whole --ranks 1 --models olmo-1b llama2-7b --name whole-h100 PEERS",)},
        whole,
        goes_on=True,
        on="H100",
    ),
}
"""By their names in the page; in the order in which they are measured."""


def read(name: str, results: Path = RESULTS) -> Result | None:
    """A result; None where there is none."""
    file = results / "speed" / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def lines_of(table: Table, results: Path = RESULTS) -> list[str]:
    """What stands in the page for a table."""
    found = {name: read(name, results) for name in table.results}
    if missing := [name for name, one in found.items() if one is None]:
        return [f"Not measured yet: {', '.join(f'`{name}.json`' for name in missing)}."]
    lines = table.render(*found.values())
    old = {
        name: one["environment"]["commit"]
        for name, one in found.items()
        if one is not None and one["environment"].get("code") != code_digest()
    }
    if old and not table.goes_on:  # it marks its cases
        lines += ["", f"Of earlier code: {', '.join(f'`{n}.json`, commit {str(c)[:7]}' for n, c in old.items())}."]
    return lines


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    return re.sub(r"\{\{(\w+)\}\}", lambda m: "\n".join(lines_of(TABLES[m[1]], results)), TEMPLATE.read_text())


def to_measure(tables: Sequence[str], again: bool = False) -> list[tuple[str, str]]:
    """Results that are missing or of other code, and their commands."""
    found = []
    for name in tables:
        for result, commands in TABLES[name].results.items():
            have = read(result)
            current = have is not None and have["environment"].get("code") == code_digest()
            if again or TABLES[name].goes_on or not current:
                found += [(result, command) for command in commands]
    return found


def gpus() -> list[str]:
    """The names of the GPUs here."""
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def why_not(result: str, command: str, peers: str | None, here: Sequence[str]) -> str | None:
    """Why a command cannot be started on the GPUs ``here``; None if it can."""
    table = next(table for table in TABLES.values() if result in table.results)
    needed = 2 if command.startswith(TWO) or "--ranks 2" in command else 1
    if len(here) < needed:
        return f"needs {needed} GPUs, {len(here)} here"
    if table.on not in here[0]:
        return f"is about {table.on}, not {here[0]}"
    if "PEERS" in command and peers is None:
        return "needs --peers"
    return None


def measure(arguments: argparse.Namespace) -> None:
    """Start commands, until there are none or time is over. One that fails is named, and the next is started."""
    end, here = time.monotonic() + arguments.seconds, gpus()
    for result, command in to_measure(arguments.only or list(TABLES), arguments.again):
        if (reason := why_not(result, command, arguments.peers, here)) is not None:
            print(f"left out, {reason}: {result}", flush=True)
            continue
        left = end - time.monotonic()
        if left < 30:
            print(f"not started, --seconds {arguments.seconds:g} are over: {result}", flush=True)
            continue
        words = shlex.split(command.replace("PEERS", f"--peers {shlex.quote(arguments.peers or '')}"))
        if words[1].endswith(".whole"):  # it starts cases of its own
            words += ["--seconds", f"{max(30.0, left - 60):.0f}"]
        print(f"== {result}: {command}", flush=True)
        try:
            status: object = subprocess.run([sys.executable, *words], cwd=ROOT, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            status = "time was over"
        if status:
            print(f"{result}: ended with {status}", flush=True)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--measure", action="store_true", help="what is missing or of other code, before")
    parser.add_argument("--only", nargs="+", choices=[*TABLES], help="tables to measure (default: all)")
    parser.add_argument("--again", action="store_true", help="measure also what is of this code")
    parser.add_argument("--seconds", type=float, default=540, help="start no command later than this")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    if arguments.measure:
        measure(arguments)
    PAGE.write_text(page())
    print("wrote", PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
