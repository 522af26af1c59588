"""What the runs of `benchmarks/convergence/long.py` say.

python -m benchmarks.convergence.long_report [--results JSON ...] [--plot
docs/figures/convergence-long.png]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.arguments import argument_parser, one_line
from benchmarks.common import read_json, result_path, show, write_figure
from benchmarks.convergence.flow import BF16
from benchmarks.convergence.long import PAIR, VARIANTS

__all__ = ["held_out_gaps", "plot", "report"]

COLORS = dict(
    zip(VARIANTS, ("0.35", "tab:blue", "0.6", "tab:cyan", "tab:orange", "tab:green"), strict=True)
)


def held_out_gaps(runs: dict[str, dict[str, Any]], other: str = "coat") -> dict[int, float]:
    """The held-out loss of ``other`` relative to BF16's, by step, where both have one."""
    bf16, its = (
        dict(zip(r["held_out_steps"], r["held_out_losses"], strict=True))
        for r in (runs[BF16], runs[other])
    )
    return {step: its[step] / bf16[step] - 1 for step in bf16 if step in its}


def report(runs: dict[str, dict[str, Any]], steps: int) -> None:
    """Print how far each run is and its speed; of whole runs, the held-out loss and its gap to
    BF16's.
    """
    for name, run in runs.items():
        if not run["steps"]:
            print(f"{name}: no step")
            continue
        values = run | {"of": steps, "training_loss": run["training_losses"][-1]}
        show(
            name,
            values,
            steps="d",
            of="d",
            tokens=",d",
            tokens_per_second_per_gpu=",.0f",
            peak_memory_bytes=",d",
            training_loss=".4f",
            skipped_steps="d",
        )
    whole = {name: last_quarter(run) for name, run in runs.items() if run["steps"] == steps}
    for name, loss in whole.items():
        gap = f", {loss / whole[BF16] - 1:+.3%}" if BF16 in whole else ""
        print(f"last quarter, held out: {name} {loss:.4f}{gap}")


def last_quarter(run: dict[str, Any]) -> float:
    """Mean of the held-out losses of the last quarter of its steps."""
    pairs = zip(run["held_out_steps"], run["held_out_losses"], strict=True)
    return fmean(loss for step, loss in pairs if step > 0.75 * run["steps"])


def plot(drawn: Mapping[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Training and held-out loss of BF16 and coat over tokens, for each seed and text; below, gaps
    of held-out losses.

    Raises:
        ValueError: one of the runs has made no step.
    """
    if none := [name for runs in drawn.values() for name, run in runs.items() if not run["steps"]]:
        raise ValueError(f"plot: got no step of {', '.join(none)}, accepted: some of all runs")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 6), sharex=True, layout="constrained", height_ratios=[3, 2]
    )
    ends = []
    for (where, runs), marker in zip(drawn.items(), itertools.cycle("osv^"), strict=False):
        for name, run in runs.items():
            tokens = run["tokens"] / run["steps"] / 1e6  # millions, a step
            color, label = COLORS[name], f"{name}, {where}"
            if name in PAIR:
                steps = [
                    min((n + 1) * run["steps_a_point"], run["steps"])
                    for n in range(len(run["training_losses"]))
                ]
                above.plot(
                    [n * tokens for n in steps],
                    run["training_losses"],
                    color=color,
                    linewidth=0.7,
                    alpha=0.6,
                )
                x = [n * tokens for n in run["held_out_steps"]]
                above.plot(
                    x,
                    run["held_out_losses"],
                    marker,
                    color=color,
                    markersize=3,
                    label=f"{label}, held out",
                )
                ends += run["training_losses"]
            if name != BF16:
                gaps = held_out_gaps(runs, name)
                x = [step * tokens for step in gaps]
                y = [100 * gap for gap in gaps.values()]
                below.plot(
                    x, y, f"{marker}-", color=color, markersize=3, linewidth=0.7, label=label
                )
    below.axhline(0, color="0.6", linewidth=0.8)
    above.set(
        ylabel="loss, nats a token", ylim=(0.95 * min(ends), sorted(ends)[int(0.97 * len(ends))])
    )
    below.set(xlabel="million tokens", ylabel="held out, to BF16, %", ylim=(-3, 3))
    for axis in (above, below):
        axis.legend(fontsize=7, ncols=2)
        axis.grid(alpha=0.3)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    print("wrote", path)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, plot=None)
    parser.add_argument("--results", nargs="+", type=Path, metavar="JSON", help="default: all kept")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    kept = result_path("convergence/long", arguments.output).parent
    paths = arguments.results or kept.glob("long*.json")
    with one_line():
        results = [read_json(path, "settings", "data", "runs") for path in paths]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    steps = dict[str, int]()
    for result in sorted(
        results, key=lambda result: (result["settings"]["seed"], result["data"]["tokens"])
    ):
        where = f"seed {result['settings']['seed']}, text of {result['data']['tokens'] / 1e6:.0f} M"
        found.setdefault(where, {}).update(result["runs"])
        steps[where] = result["settings"]["steps"]
    for where, runs in found.items():
        print(f"== {where} tokens")
        report(runs, steps[where])
    if arguments.plot is not None:
        plot(found, Path(arguments.plot))


if __name__ == "__main__":
    main()
