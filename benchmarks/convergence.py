"""Paired training: CoatAdamW against fp32 AdamW, same weights, same batches, on a CPU.

    python -m benchmarks.convergence [--steps 500] [--seeds 0 1] [--runs adamw adamw-nudged coat]

The model is `benchmarks/small_gpt.py`, the text the running Python's standard library. Prints the held-out loss of
every run and its gap to the fp32 run of the same seed; writes `convergence.json` and `docs/figures/convergence.png`.
`adamw-nudged` is fp32 AdamW from initial weights that differ by one part in a million: the gap that arises without any
quantization, because training amplifies every difference.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_result
from benchmarks.small_gpt import GPT, ROOT, Shape, prepare_tokens, train
from coat_dist import CoatAdamW, param_groups

RUNS = ("adamw", "adamw-nudged", "coat", "coat-plain", "coat-stochastic")
COAT_OPTIONS: dict[str, dict[str, Any]] = {
    "coat": {},
    "coat-plain": {"expand": False},
    "coat-stochastic": {"stochastic_rounding": True},
}
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


def optimizer_for(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a run, over the same parameter groups for all."""
    groups = param_groups(model, WEIGHT_DECAY)
    if name in COAT_OPTIONS:
        return CoatAdamW(groups, betas=BETAS, **COAT_OPTIONS[name])
    return torch.optim.AdamW([{k: g[k] for k in ("params", "weight_decay")} for g in groups], betas=BETAS)


def run(name: str, seed: int, tokens: torch.Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training run."""
    shape = Shape()
    model = GPT(shape, seed)
    if name == "adamw-nudged":
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))
    every = max(1, arguments.steps // 10)
    record = train(
        model,
        optimizer_for(name, model),
        tokens,
        shape,
        steps=arguments.steps,
        seed=seed,
        lr=arguments.lr,
        evaluate_at={*range(every, arguments.steps + 1, every), arguments.steps},
    )
    record["loss"] = [round(loss, 5) for loss in record["loss"]]
    return {"run": name, "seed": seed, **record}


def add_gaps(records: list[dict[str, Any]]) -> None:
    """Add ``held_out_gap``: the last held-out loss relative to the fp32 run of the same seed, minus one."""
    base = {r["seed"]: r for r in records if r["run"] == "adamw"}
    for r in records:
        last = max(r["held_out"])
        r["held_out_gap"] = r["held_out"][last] / base[r["seed"]]["held_out"][last] - 1


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Loss curves of the first seed, and the held-out gap to fp32 AdamW of all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    base = {r["seed"]: r["held_out"] for r in records if r["run"] == "adamw"}
    names = list(dict.fromkeys(r["run"] for r in records))
    for r in records:
        color, first = f"C{names.index(r['run'])}", r["seed"] == records[0]["seed"]
        label = r["run"] if first else None
        steps = sorted(r["held_out"])
        if first:
            left.plot(steps, [r["held_out"][s] for s in steps], "o-", color=color, markersize=3, label=label)
        if r["run"] != "adamw":
            gap = [100 * (r["held_out"][s] / base[r["seed"]][s] - 1) for s in steps]
            right.plot(steps, gap, "o-" if first else "s--", color=color, markersize=3, label=label)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="held-out loss")
    right.set(xlabel="step", ylabel="%", title="gap to fp32 AdamW of the same seed")
    right.axhspan(-0.1, 0.1, color="0.9")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["adamw", "adamw-nudged", "coat"])
    parser.add_argument("--lr", type=float, default=3e-3, help="peak")
    parser.add_argument("--output", default=None, help="folder of JSON and picture (default: those of the repository)")
    arguments = parser.parse_args()
    if "adamw" not in arguments.runs:
        parser.error(f"--runs: got {' '.join(arguments.runs)}, accepted: a list with adamw, the baseline")
    if arguments.steps < 1:
        parser.error(f"--steps: got {arguments.steps}, accepted: an integer >= 1")
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(folder, Shape().vocabulary)
    records = []
    for seed in arguments.seeds:
        for name in dict.fromkeys(arguments.runs):
            records.append(run(name, seed, tokens, arguments))
            last = max(records[-1]["held_out"])
            print(f"seed {seed} {name:<16} held-out {records[-1]['held_out'][last]:.4f}", flush=True)
    add_gaps(records)
    for r in records:
        print(f"seed {r['seed']} {r['run']:<16} gap {100 * r['held_out_gap']:+.3f} %  ({r['seconds']:.0f} s)")
    print("wrote", write_result("convergence", {"settings": vars(arguments), "runs": records}, arguments.output))
    plot(records, Path(arguments.output or ROOT / "docs" / "figures") / "convergence.png")


if __name__ == "__main__":
    main()
