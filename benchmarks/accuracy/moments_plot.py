"""Pictures of the errors that `benchmarks/accuracy/moments.py` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.common import write_figure

__all__ = ["plot_ranges", "plot_rivals", "plot_table"]


def plot_table(ours: list[list[float]], published: list[list[float]], names: list[str], path: Path) -> None:
    """The sixteen cells, each relative to plain E4M3 for both moments: measured here, and published."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, cells, title in ((axes[0], ours, "measured here"), (axes[1], published, "COAT, Table 1")):
        axis.imshow(cells, cmap="RdYlGn_r", vmin=0, vmax=2)
        for i, row in enumerate(cells):
            for j, value in enumerate(row):
                axis.text(j, i, f"{value:.2f}", ha="center", va="center")
        axis.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="v", ylabel="m", title=title)
        axis.set_xticklabels(names, fontsize=8)
        axis.set_yticklabels(names, fontsize=8)
    figure.suptitle("mean square error of m / (√v + ε), relative to E4M3 without expansion", fontsize=10)
    _save(figure, path)


def plot_ranges(ranges: dict[str, Any], path: Path) -> None:
    """Error over R for each moment and format; zero is the package's choice."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, found in ranges.items():
        axis = axes["mv".index(found["moment"])]
        x = [row["log2_range"] - found["chosen"] for row in found["rows"]]
        axis.plot(x, [row["table1"] for row in found["rows"]], "o-", markersize=3, label=name[2:])
    for axis, title in ((axes[0], "first moment"), (axes[1], "second moment")):
        axis.axvline(0, color="0.6", linewidth=0.8)
        axis.set(xlabel="log2(R / ours)", ylabel="relative mean square error", title=title, yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    _save(figure, path)


def plot_rivals(pairs: list[dict[str, Any]], path: Path) -> None:
    """Errors of pairs of encodings, with bytes a parameter in the labels."""
    figure, axis = plt.subplots(figsize=(10, 0.36 * len(pairs) + 1), layout="constrained")
    positions = range(len(pairs))
    for metric, marker, label in (
        ("table1", "o", "m / (√v + ε)"),
        ("table1_no_embedding", "s", "m / (√v + ε), without embedding"),
        ("next", "x", "next update"),
    ):
        axis.plot([row[metric] for row in pairs], positions, marker, linestyle="none", label=label)
    axis.set(xscale="log", yticks=positions, xlabel="relative mean square error")
    axis.set_yticklabels([f"{row['name']}  {row['bytes']:.3f} B" for row in pairs], fontsize=8)
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    write_figure(path, figure, dpi=80)
    plt.close(figure)
