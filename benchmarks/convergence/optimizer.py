"""Paired training: CoatAdamW against fp32 AdamW, same weights, same batches, on one GPU or, much smaller, on a CPU.

    python -m benchmarks.convergence.optimizer [--seeds 0 1 2] [--budget-seconds 570] [--resume]

The model is `benchmarks/small_gpt.py`, the text the bytes of Python's standard library and installed
packages. On a GPU: 19 M parameters in fp32, products in bf16, 500 steps of 32 768 tokens, held-out loss over 2048
windows, a million tokens. Each seed runs all variants; a variant's gap is its held-out loss over that of fp32 AdamW
with the same seed and beta2, minus one.
`adamw-nudged` is fp32 AdamW from initial weights that differ by one part in a million: what training itself makes of a
difference too small to matter, the noise floor of a gap.

Prints a table of gaps, mean and standard error over seeds. After every run it writes `convergence/optimizer.json`, with
training losses rounded to 5 decimals; with `--resume` runs found there with the same settings and data are not
repeated. At `--budget-seconds` it stops before a run that would not end in time. Draws
`docs/figures/convergence-optimizer.png`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.encodings import altered
from benchmarks.arguments import check_device, one_line, positive_float, positive_int
from benchmarks.common import argument_parser, figure_path, result_path, write_result
from benchmarks.convergence.optimizer_report import plot, print_table, summarize
from benchmarks.small_gpt import BETAS, BYTES_VOCABULARY, GPT, WEIGHT_DECAY, Shape, fp32_adamw, prepare_bytes, train
from coat_dist import CoatAdamW, param_groups

SHAPES = {
    "cuda": Shape(BYTES_VOCABULARY, hidden=512, layers=6, heads=8, ffn=1408, sequence=512, batch=64),
    "cpu": Shape(BYTES_VOCABULARY, hidden=128, layers=2, heads=4, ffn=384, sequence=128, batch=16),
}
MAX_BYTES = {"cuda": 64_000_000, "cpu": 16_000_000}
WINDOWS = {"cuda": 2048, "cpu": 256}
NAME = "convergence/optimizer"


@dataclass(frozen=True)
class Variant:
    """One optimizer: "adamw" (torch's, fp32), "coat" or "coat-wide-range" (CoatAdamW with a wider range for m)."""

    optimizer: str
    beta2: float = BETAS[1]
    options: dict[str, Any] = field(default_factory=dict)
    nudged: bool = False


_INT8_LOG8 = {"first_moment": "int8", "second_moment": "log8"}
VARIANTS = {
    "adamw": Variant("adamw"),
    "adamw-nudged": Variant("adamw", nudged=True),
    "coat": Variant("coat"),
    "coat-int8-log8": Variant("coat", options=_INT8_LOG8),
    "coat-wide-range": Variant("coat-wide-range"),
    "adamw-0.999": Variant("adamw", 0.999),
    "coat-0.999-nearest": Variant("coat", 0.999, {"stochastic_rounding": False}),
    "coat-0.999-auto": Variant("coat", 0.999),
    "coat-0.999-int8-log8": Variant("coat", 0.999, _INT8_LOG8),
}
DEFAULT = [name for name in VARIANTS if name != "coat-0.999-int8-log8"]


class WideRangeAdamW(CoatAdamW):
    """CoatAdamW with R = 2 F**2 for the first moment: finer codes, which lift the smallest element of every group."""

    def step(self, closure: Any = None) -> Any:
        with altered(factor=2.0):
            return super().step(closure)


def optimizer_for(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a variant, over the same parameter groups for all."""
    variant = VARIANTS[name]
    if variant.optimizer == "adamw":
        return fp32_adamw(model, variant.beta2)
    kind = WideRangeAdamW if variant.optimizer == "coat-wide-range" else CoatAdamW
    return kind(param_groups(model, WEIGHT_DECAY), betas=(BETAS[0], variant.beta2), **variant.options)


def run(name: str, seed: int, tokens: torch.Tensor, shape: Shape, steps: int, lr: float, windows: int) -> dict:
    """One training run on the device of ``tokens``."""
    model = GPT(shape, seed)
    if VARIANTS[name].nudged:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))
    model.to(tokens.device)
    every = max(1, steps // 5)
    optimizer = optimizer_for(name, model)
    evaluate_at = {*range(every, steps + 1, every), steps}
    record = train(
        model,
        optimizer,
        tokens,
        shape,
        steps=steps,
        seed=seed,
        lr=lr,
        evaluate_at=evaluate_at,
        windows=windows,
        autocast=tokens.is_cuda,
    )
    record["loss"] = [round(loss, 5) for loss in record["loss"]]
    return {"run": name, "seed": seed, "beta2": VARIANTS[name].beta2, **record}


def remaining(todo: list[tuple[str, int]], records: list[dict], started: float, budget: float | None):
    """The runs still to do, one after the other, as long as the next would end in time by the longest so far."""
    done = {(r["run"], r["seed"]) for r in records}
    for key in todo:
        longest = max((r["wall_seconds"] for r in records), default=0.0)
        if key not in done:
            if budget is not None and time.monotonic() - started + 1.1 * longest > budget:
                return
            yield key


def _saved(path: Path, settings: dict[str, Any]) -> list[dict]:
    """Runs of an earlier call with the same settings."""
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["settings"] != settings:
        raise SystemExit(f"--resume: {path} was written with {saved['settings']}, accepted: {settings}")
    return [{**r, "held_out": {int(k): v for k, v in r["held_out"].items()}} for r in saved["runs"]]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=positive_int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=list(VARIANTS), default=DEFAULT)
    parser.add_argument("--lr", type=positive_float, default=1e-3, help="peak, reached after a tenth of the steps")
    parser.add_argument("--batch", type=positive_int, help="sequences a step")
    parser.add_argument("--layers", type=positive_int)
    parser.add_argument("--windows", type=positive_int, help="of the held-out loss")
    parser.add_argument("--max-bytes", type=positive_int, help="of text")
    parser.add_argument("--budget-seconds", type=positive_float, help="start no run that would end later")
    parser.add_argument("--resume", action="store_true", help="keep the runs in the result file")
    arguments = parser.parse_args(given)
    for name in arguments.runs:
        base = "adamw" if VARIANTS[name].beta2 == BETAS[1] else f"adamw-{VARIANTS[name].beta2}"
        if base not in arguments.runs:
            parser.error(f"--runs: got {name} without {base}, accepted: a list with the fp32 run of the same beta2")
    return arguments


def main() -> None:
    given = parse()
    with one_line():
        check_device(given.device)
    started = time.monotonic()
    chosen = {k: v for k in ("batch", "layers") if (v := getattr(given, k)) is not None}
    shape = replace(SHAPES[given.device], **chosen)
    windows = given.windows or WINDOWS[given.device]
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_bytes(folder, given.max_bytes or MAX_BYTES[given.device])
    settings = {
        "device": given.device,
        "shape": vars(shape),
        "steps": given.steps,
        "lr": given.lr,
        "held_out_tokens": windows * shape.sequence,
        "tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(tokens.to(torch.int16).numpy().tobytes()).hexdigest(),
    }
    records = _saved(result_path(NAME, given.output), settings) if given.resume else []
    tokens = tokens.to(given.device)
    todo = [(name, seed) for seed in dict.fromkeys(given.seeds) for name in dict.fromkeys(given.runs)]
    path = None
    for name, seed in remaining(todo, records, started, given.budget_seconds):
        before = time.monotonic()
        record = run(name, seed, tokens, shape, given.steps, given.lr, windows)
        records.append({**record, "wall_seconds": round(time.monotonic() - before, 1)})
        last = record["held_out"][given.steps]
        print(f"seed {seed} {name:<22} held-out {last:.5f}  {records[-1]['wall_seconds']:.1f} s", flush=True)
        result = {"settings": settings, "gaps": summarize(records), "runs": records}
        path = write_result(NAME, result, given.output)
    missing = [key for key in todo if key not in {(r["run"], r["seed"]) for r in records}]
    if missing:
        print(f"stopped at --budget-seconds with {len(missing)} of {len(todo)} runs left; --resume does them")
        if path is None:
            sys.exit("error: no run was finished; the result stays as it was")
    print_table(summarize(records))
    if path is not None:
        print("wrote", path)
        plot(records, figure_path(NAME.replace("/", "-"), given.output))


if __name__ == "__main__":
    main()
