"""Gaps of paired training runs, as a table and a picture; see `benchmarks/convergence/optimizer.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.common import write_figure

__all__ = ["gaps", "plot", "print_table", "summarize"]

BAR = 1e-3
"""The gap that is aimed at."""


def gaps(records: list[dict[str, Any]], step: int | None = None) -> dict[str, dict[int, float]]:
    """{run: {seed: gap}}: the held-out loss after ``step`` (default: the last) over that of fp32 AdamW with the same
    seed and beta2, minus one. Runs without their fp32 run are left out."""
    base = {(r["beta2"], r["seed"]): r for r in records if _is_base(r)}
    found: dict[str, dict[int, float]] = {}
    for r in records:
        partner = base.get((r["beta2"], r["seed"]))
        if partner is not None:
            at = max(r["held_out"]) if step is None else step
            found.setdefault(r["run"], {})[r["seed"]] = r["held_out"][at] / partner["held_out"][at] - 1
    return found


def _is_base(record: dict[str, Any]) -> bool:
    return record["run"] in ("adamw", f"adamw-{record['beta2']}")


def summarize(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run: mean held-out loss; mean, standard error and largest magnitude of its gaps over seeds.

    The standard error is None with one seed.
    """
    rows = []
    for name, by_seed in gaps(records).items():
        values = list(by_seed.values())
        n, mean = len(values), math.fsum(values) / len(values)
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n) if n > 1 else None
        losses = [r["held_out"][max(r["held_out"])] for r in records if r["run"] == name and r["seed"] in by_seed]
        largest = max(map(abs, values))
        row = {"run": name, "seeds": n, "held_out": math.fsum(losses) / n, "gap": mean, "standard_error": error}
        rows.append({**row, "largest": largest, "within_bar": abs(mean) + (error or 0.0) <= BAR})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """The summary as a Markdown table."""
    print("\n| run | seeds | held-out loss | gap, % | largest, % | within 0.1 % |\n|---|---|---|---|---|---|")
    for row in rows:
        error = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.3f}"
        print(
            f"| {row['run']} | {row['seeds']} | {row['held_out']:.5f} | {100 * row['gap']:+.3f}{error} "
            f"| {100 * row['largest']:.3f} | {'yes' if row['within_bar'] else 'no'} |"
        )
    print()


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Held-out losses of the first seed; gaps of every run to fp32 AdamW, mean over seeds with standard error."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    first = records[0]["seed"]
    steps = sorted(records[0]["held_out"])
    for i, name in enumerate(dict.fromkeys(r["run"] for r in records)):
        for r in records:
            if r["run"] == name and r["seed"] == first:
                left.plot(steps, [r["held_out"][s] for s in steps], "o-", color=f"C{i}", markersize=3, label=name)
        at_steps = [list(gaps(records, s).get(name, {}).values()) for s in steps]
        if not all(at_steps) or all(_is_base(r) for r in records if r["run"] == name):
            continue
        mean = [100 * math.fsum(x) / len(x) for x in at_steps]
        spread = [100 * _standard_error(x) for x in at_steps]
        right.errorbar(steps, mean, spread, fmt="o-", color=f"C{i}", markersize=3, capsize=2, label=name)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="held-out loss")
    right.set(xlabel="step", ylabel="%", title="gap to fp32 AdamW of the same seed and β2")
    right.axhspan(-100 * BAR, 100 * BAR, color="0.9")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    write_figure(path, figure, dpi=80)
    plt.close(figure)


def _standard_error(values: list[float]) -> float:
    mean, n = math.fsum(values) / len(values), len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n) if n > 1 else 0.0
