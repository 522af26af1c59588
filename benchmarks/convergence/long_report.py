"""What the two runs of `benchmarks/convergence/long.py` say.

python -m benchmarks.convergence.long_report [--result JSON] [--plot docs/figures/convergence-long.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
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


def plot(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Training and held-out loss of both runs over tokens; below, the gap of each.

    Raises:
        ValueError: one of them has made no step.
    """
    if none := [name for name, run in runs.items() if not run["steps"]]:
        raise ValueError(f"plot: got no step of {', '.join(none)}, accepted: some of both runs")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, layout="constrained", height_ratios=[2, 1]
    )
    tokens, curves = {}, {}
    for color, (name, run) in zip(("0.35", "tab:blue"), runs.items(), strict=True):
        tokens[name] = run["tokens"] / run["steps"] / 1e6  # millions, a step
        points = [min((i + 1) * run["steps_a_point"], run["steps"]) for i in range(len(run["training_losses"]))]
        curves[name] = dict(zip(points, run["training_losses"], strict=True))
        x = [p * tokens[name] for p in points]
        above.plot(x, run["training_losses"], color=color, linewidth=1, label=f"{name}, training")
        x = [p * tokens[name] for p in run["held_out_steps"]]
        above.plot(x, run["held_out_losses"], "o", color=color, markersize=3, label=f"{name}, held out")
    bf16, coat = curves.values()
    shared = [p for p in bf16 if p in coat]
    width = max(1, len(shared) // 24)
    smooth = [
        (shared[i], sum(coat[p] for p in part) / sum(bf16[p] for p in part) - 1)
        for i in range(width - 1, len(shared))
        if (part := shared[i - width + 1 : i + 1])
    ]
    below.plot([p * tokens[BF16] for p, _ in smooth], [100 * g for _, g in smooth], color="tab:blue", linewidth=1)
    gaps = held_out_gaps(runs)
    below.plot([p * tokens[BF16] for p in gaps], [100 * g for g in gaps.values()], "o", color="tab:blue", markersize=3)
    below.axhline(0, color="0.6", linewidth=0.8)
    ends = [*bf16.values(), *coat.values()]
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
    parser.add_argument("--result", type=Path, default=result_path("convergence/long"), metavar="JSON")
    parser.add_argument("--plot", type=picture, default=None, help="where to draw the curves")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with one_line():
        found = read_result(arguments.result, "settings", "runs")
    report(found["runs"], found["settings"]["steps"])
    if arguments.plot is not None:
        plot(found["runs"], arguments.plot)


if __name__ == "__main__":
    main()
