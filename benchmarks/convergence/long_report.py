"""What the runs of `benchmarks/convergence/long.py` say.

python -m benchmarks.convergence.long_report [--results JSON ...] [--plot docs/figures/convergence-long.png]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.arguments import one_line, picture
from benchmarks.common import read_result, result_path, write_figure
from benchmarks.convergence.flow import BF16

__all__ = ["held_out_gaps", "plot", "report"]


def held_out_gaps(runs: dict[str, dict[str, Any]], other: str = "coat") -> dict[int, float]:
    """The held-out loss of ``other`` relative to BF16's, by step, where both have one."""
    bf16, its = (dict(zip(r["held_out_steps"], r["held_out_losses"], strict=True)) for r in (runs[BF16], runs[other]))
    return {step: its[step] / bf16[step] - 1 for step in bf16 if step in its}


def report(runs: dict[str, dict[str, Any]], steps: int) -> None:
    """Print how far each run is, its speed, and the gaps of the held-out loss."""
    for name, run in runs.items():
        if not run["steps"]:
            print(f"{name}: no step")
            continue
        speed, memory = run["tokens_per_second_per_gpu"], run["peak_memory_bytes"] / 2**30
        print(
            f"{name}: {run['steps']} of {steps} steps, {run['tokens'] / 1e6:.0f} M tokens, {speed:,.0f} tokens/s/GPU, "
            f"peak {memory:.1f} GiB, training loss {run['training_losses'][-1]:.4f}, {run['skipped_steps']} skipped"
        )
    if all(run["steps"] for run in runs.values()):
        for step, gap in held_out_gaps(runs).items():
            print(f"step {step}: held-out loss {gap:+.3%}")


def last_quarter(run: dict[str, Any]) -> float:
    """Mean of the held-out losses of the last quarter of its steps."""
    pairs = zip(run["held_out_steps"], run["held_out_losses"], strict=True)
    return fmean(loss for step, loss in pairs if step > 0.75 * run["steps"])


def plot(seeds: Mapping[int, dict[str, dict[str, Any]]], path: Path) -> None:
    """Training and held-out loss of both runs of each seed over tokens; below, the gap of the held-out losses.

    Raises:
        ValueError: one of them has made no step.
    """
    if none := [name for runs in seeds.values() for name, run in runs.items() if not run["steps"]]:
        raise ValueError(f"plot: got no step of {', '.join(none)}, accepted: some of both runs")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, layout="constrained", height_ratios=[2, 1]
    )
    ends = []
    for (seed, runs), marker in zip(seeds.items(), itertools.cycle("osv^"), strict=False):
        for color, (name, run) in zip(("0.35", "tab:blue"), runs.items(), strict=True):
            tokens = run["tokens"] / run["steps"] / 1e6  # millions, a step
            steps = [min((n + 1) * run["steps_a_point"], run["steps"]) for n in range(len(run["training_losses"]))]
            above.plot([n * tokens for n in steps], run["training_losses"], color=color, linewidth=0.7, alpha=0.6)
            x, label = [n * tokens for n in run["held_out_steps"]], f"{name}, held out, seed {seed}"
            above.plot(x, run["held_out_losses"], marker, color=color, markersize=3, label=label)
            ends += run["training_losses"]
        gaps = held_out_gaps(runs)
        x = [step * tokens for step in gaps]
        below.plot(x, [100 * gap for gap in gaps.values()], f"{marker}-", color="tab:blue", markersize=3, linewidth=0.7)
    below.axhline(0, color="0.6", linewidth=0.8)
    above.set(ylabel="loss, nats a token", ylim=(0.95 * min(ends), sorted(ends)[int(0.97 * len(ends))]))
    below.set(xlabel="million tokens", ylabel="coat to BF16, %", ylim=(-2, 2))
    above.legend(fontsize=8)
    for axis in (above, below):
        axis.grid(alpha=0.3)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    print("wrote", path)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", nargs="+", type=Path, metavar="JSON", help="one a seed (default: those kept)")
    parser.add_argument("--plot", type=picture, default=None, help="where to draw the curves")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    first = result_path("convergence/long")
    paths = arguments.results or [first, *first.parent.glob("long-seed-*.json")]
    with one_line():
        results = [read_result(path, "settings", "runs", option="--results") for path in paths]
    results.sort(key=lambda result: result["settings"]["seed"])
    seeds = {result["settings"]["seed"]: result["runs"] for result in results}
    for result in results:
        print(f"== seed {result['settings']['seed']}")
        report(result["runs"], result["settings"]["steps"])
    if all(run["steps"] == r["settings"]["steps"] for r in results for run in r["runs"].values()):
        bf16, coat = ([last_quarter(runs[name]) for runs in seeds.values()] for name in (BF16, "coat"))
        for seed, its, ours in zip(seeds, bf16, coat, strict=True):
            print(f"seed {seed}, last quarter, held out: BF16 {its:.4f}, coat {ours:.4f}, {ours / its - 1:+.3%}")
        print(f"BF16's seeds differ by {max(bf16) / min(bf16) - 1:.3%}")
    if arguments.plot is not None:
        plot(seeds, arguments.plot)


if __name__ == "__main__":
    main()
