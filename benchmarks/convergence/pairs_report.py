"""Gaps of `benchmarks/convergence/pairs.py`: means over pairs of equal seeds, with their errors.

    python -m benchmarks.convergence.pairs_report [--results JSON ...] [--variants NAME ...] \\
        [--plot docs/figures/convergence-pairs.png] [--base VARIANT]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.arguments import argument_parser, one_line
from benchmarks.common import read_json, result_path, show, write_figure

BF16 = "bf16"
"""The variant that all others are compared with."""
LOSSES = {"gap": "held_out_loss", "gap_in_bf16": "held_out_loss_bf16"}
"""Gaps of a variant: by its own forward, and of its weights in BF16 layers."""


def gaps(runs: Sequence[dict[str, Any]], variant: str, key: str, base: str = BF16) -> list[float]:
    """A loss of a variant relative to that of the variant ``base`` with the same seed, in percent,
    for each pair; not finite where a run diverged.
    """
    its, theirs = (
        {run["seed"]: run[key] for run in runs if run["variant"] == name}
        for name in (variant, base)
    )
    return [100 * (its[seed] / theirs[seed] - 1) for seed in sorted(theirs.keys() & its.keys())]


def report(runs: Sequence[dict[str, Any]], base: str = BF16) -> list[dict[str, Any]]:
    """For each variant the number of pairs, and in percent the mean gap, its standard error
    (``se``) and the standard deviation of a pair (``sd``), all without the pairs whose run
    ``diverged``.
    """
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        if variant == base:
            continue
        row: dict[str, Any] = {"variant": variant}
        for name, key in LOSSES.items():
            every = gaps(runs, variant, key, base)
            found = [gap for gap in every if isfinite(gap)]
            row |= {"pairs": len(found), "diverged": len(every) - len(found)}
            if found:
                row[name] = fmean(found)
            if len(found) > 1:
                row[f"{name}_sd"] = stdev(found)
                row[f"{name}_se"] = stdev(found) / len(found) ** 0.5
        rows.append(row)
    return rows


def forward(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the flow's forward adds to the held-out loss of weights that no FP8 layers have
    trained, in percent: means over runs, in all layers and in one alone.
    """
    found = [run["flow_forward"] for run in runs if run.get("flow_forward")]
    found = [one for one in found if all(map(isfinite, one.values()))]
    means = {where: fmean(one[where] for one in found) for where in (found or [{}])[0]}
    return {"runs": len(found)} | means


def show_rows(rows: Sequence[dict[str, Any]], base: str = BF16) -> None:
    """Print the table of :func:`report`."""
    print(f"held-out loss to that of {base!r} with the same seed, in percent")
    for row in rows:
        show(
            row["variant"],
            row,
            pairs="d",
            diverged="d",
            gap="+.3f",
            gap_se=".3f",
            gap_sd=".3f",
            gap_in_bf16="+.3f",
            gap_in_bf16_se=".3f",
        )


def plot(rows: Sequence[dict[str, Any]], path: Path, base: str = BF16) -> None:
    """Gaps with their standard errors, a line for each variant that has several pairs. Two pairs
    are drawn as two points: they are where their error would end.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [row for row in rows if "gap_se" in row]
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.3 * len(drawn)), layout="constrained")
    for name, color, shift in (("gap", "tab:blue", -0.12), ("gap_in_bf16", "tab:orange", 0.12)):
        bar: dict[str, Any] = {"fmt": "o", "color": color, "markersize": 4, "capsize": 3}
        legend = "as trained" if name == "gap" else "weights in BF16 layers"
        axis.errorbar([], [], xerr=[], label=legend, **bar)
        for line, row in enumerate(drawn):
            mean, error, y = row[name], row[f"{name}_se"], line + shift
            if row["pairs"] > 2:
                axis.errorbar(mean, y, xerr=error, **bar)
            else:
                axis.plot([mean - error, mean + error], [y, y], "x", color=color, markersize=5)
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.set_yticks(range(len(drawn)), [f"{row['variant']} ({row['pairs']})" for row in drawn])
    axis.invert_yaxis()
    axis.set_xlabel(f"held-out loss to {base} of the same seed, %, with standard error")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    write_figure(path, figure, dpi=120)
    plt.close(figure)
    print("wrote", path)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argument_parser(__doc__, plot=None, base=BF16)
    parser.add_argument(
        "--results", nargs="+", type=Path, metavar="JSON", help="default: pairs.json"
    )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="default: all")
    return parser.parse_args(given)


def main() -> None:
    a = parse()
    paths = a.results or [result_path("convergence/pairs", a.output)]
    with one_line():
        results = [read_json(path, "settings", "runs") for path in paths]
    drawn: list[dict[str, Any]] = []
    for path, result in zip(paths, results, strict=True):
        print(f"== {path.stem}")
        rows = report(result["runs"], a.base)
        rows = [row for row in rows if a.variants is None or row["variant"] in a.variants]
        size = f"{result['settings']['parameters'] / 1e6:.0f} M"
        drawn += [row | {"variant": f"{row['variant']}, {size}"} for row in rows]
        show_rows(rows, a.base)
        added = forward(result["runs"])
        show("the flow's forward alone", added, runs="d", all="+.3f", first="+.3f", last="+.3f")
    if a.plot is not None:
        plot(drawn, Path(a.plot), a.base)


if __name__ == "__main__":
    main()
