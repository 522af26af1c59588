"""What the runs of `benchmarks/flow_convergence.py` say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["BF16", "LAST", "gaps", "mean", "report"]

BF16 = "bf16"
"""The variant that all others are compared with."""
LAST = 200
"""Last steps of a run whose training losses are averaged."""


def gaps(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """What each variant does to the held-out loss and to the mean of the last :data:`LAST` training losses.

    Of runs that made all ``steps``: the relative difference to BF16 over the seeds that both have, its standard error
    (None where no run was repeated), and the number of runs on both sides.
    """
    values: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in runs:
        if run["steps"] == steps and run["held_out_loss"] is not None:
            values.setdefault((run["variant"], run["seed"]), []).append(run)
    found = []
    for variant in dict.fromkeys(v for v, _ in values):
        seeds = [s for v, s in values if v == variant and (BF16, s) in values]
        if variant == BF16 or not seeds:
            continue
        row: dict[str, Any] = {"variant": variant, "seeds": seeds}
        row["runs"] = [sum(len(values[v, s]) for s in seeds) for v in (variant, BF16)]
        for key in ("held_out_loss", "last_training_losses"):
            means = {at: mean([r[key] for r in group]) for at, group in values.items()}
            base = mean([means[BF16, s] for s in seeds])
            row[f"{key}_gap"] = mean([means[variant, s] - means[BF16, s] for s in seeds]) / base
            freedom = sum(len(group) - 1 for group in values.values())
            squares = sum((r[key] - means[at]) ** 2 for at, group in values.items() for r in group)
            weight = sum(1 / len(values[v, s]) for s in seeds for v in (variant, BF16)) / len(seeds) ** 2
            row[f"{key}_error"] = (squares / freedom * weight) ** 0.5 / base if freedom else None
        found.append(row)
    return found


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def report(runs: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], steps: int) -> None:
    """Print a line a run, what failed, and the gaps."""
    nan = float("nan")
    for run in (*runs, *failed):
        name = f"{run['variant']:<24} seed {run['seed']} repeat {run['repeat']}  "
        if "why" in run:
            print(f"{name}FAILED: {run['why']}")
        else:
            held_out = nan if run["held_out_loss"] is None else run["held_out_loss"]
            print(f"{name}held-out {held_out:.5f}  last {LAST} training losses {run['last_training_losses']:.5f}")
    for row in gaps(runs, steps):
        shown = [
            f"{what} {row[f'{key}_gap']:+.3%} ± {nan if row[f'{key}_error'] is None else row[f'{key}_error']:.3%}"
            for what, key in (("held-out", "held_out_loss"), ("training", "last_training_losses"))
        ]
        mine, its = row["runs"]
        print(f"{row['variant']:<24} {', '.join(shown)}  ({mine} runs to {its} of BF16)")
