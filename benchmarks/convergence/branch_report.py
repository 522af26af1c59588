"""What the branches of `benchmarks/convergence/branches.py` say together.

python -m benchmarks.convergence.branch_report [--result JSON] [--plot
docs/figures/convergence-branches.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.arguments import argument_parser, one_line
from benchmarks.common import read_json, result_path, show, write_figure
from benchmarks.convergence.flow import BF16
from benchmarks.convergence.runs import LAST

__all__ = ["KEYS", "PAIR", "by_trunk", "gaps", "noise", "plot", "report"]

KEYS = {
    "held_out_loss": "held-out",
    "bf16_held_out_loss": "in BF16",
    "last_training_losses": "training",
}
"""What is compared, and what it is called in print. "in BF16": the same weights in BF16 layers."""
GAP = {"gap": "+.3%", "error": ".3%"}
"""How they are printed."""
PAIR = "trunk"
"""What two branches have in common that are compared."""


def gaps(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """What each variant does to the losses :data:`KEYS`.

    Of runs that made all ``steps``: the relative difference to BF16 over the trunks that both have,
    its standard error (None where no run was repeated), and the number of runs on both sides.
    """
    values: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for run in runs:
        if run["steps"] == steps and run["held_out_loss"] is not None:
            values.setdefault((run["variant"], run[PAIR]), []).append(run)
    found = []
    for variant in dict.fromkeys(v for v, _ in values):
        trunks = [s for v, s in values if v == variant and (BF16, s) in values]
        if variant == BF16 or not trunks:
            continue
        row: dict[str, Any] = {"variant": variant, "trunks": trunks}
        row["runs"] = [sum(len(values[v, s]) for s in trunks) for v in (variant, BF16)]
        for key in KEYS:
            means = {at: fmean([r[key] for r in group]) for at, group in values.items()}
            base = fmean([means[BF16, s] for s in trunks])
            row[f"{key}_gap"] = fmean([means[variant, s] - means[BF16, s] for s in trunks]) / base
            freedom = sum(len(group) - 1 for group in values.values())
            squares = sum((r[key] - means[at]) ** 2 for at, group in values.items() for r in group)
            weight = (
                sum(1 / len(values[v, s]) for s in trunks for v in (variant, BF16))
                / len(trunks) ** 2
            )
            row[f"{key}_error"] = (squares / freedom * weight) ** 0.5 / base if freedom else None
        found.append(row)
    return found


def noise(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """How far repeats are apart, for each variant that has some: standard deviation of a branch
    around the mean of its trunk and variant, pooled over trunks, relative to the loss.
    """
    whole = [r for r in runs if r["steps"] == steps]
    found = []
    for variant in dict.fromkeys(r["variant"] for r in whole):
        mine = [r for r in whole if r["variant"] == variant]
        groups = [
            [r for r in mine if r[PAIR] == trunk] for trunk in dict.fromkeys(r[PAIR] for r in mine)
        ]
        freedom = sum(len(group) - 1 for group in groups)
        row: dict[str, Any] = {"variant": variant, "freedom": freedom}
        for key in KEYS if freedom else ():
            squares = sum(
                (r[key] - fmean([g[key] for g in group])) ** 2 for group in groups for r in group
            )
            row[key] = (squares / freedom) ** 0.5 / fmean([r[key] for r in mine])
        found.append(row)
    return found


def by_trunk(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The gaps of each variant in each trunk alone, and the standard error of their mean that their
    own spread gives.

    It needs no repeats, and holds whatever they have in common, also where they are nearly the same
    run.
    """
    found: dict[str, dict[str, Any]] = {}
    for trunk in dict.fromkeys(r[PAIR] for r in runs):
        for gap in gaps([r for r in runs if r[PAIR] == trunk], steps):
            row = found.setdefault(
                gap["variant"], {"variant": gap["variant"], "trunks": [], **{k: [] for k in KEYS}}
            )
            row["trunks"].append(trunk)
            for key in KEYS:
                row[key].append(gap[f"{key}_gap"])
    for row in found.values():
        n = len(row["trunks"])
        for key in KEYS:
            squares = sum((gap - fmean(row[key])) ** 2 for gap in row[key])
            row[f"{key}_error"] = (squares / (n - 1) / n) ** 0.5 if n > 1 else None
    return list(found.values())


def report(runs: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], steps: int) -> None:
    """Print a line a branch, what failed, the gaps, those of each trunk, and how far repeats are
    apart.
    """
    for run in runs:
        show(
            f"{run['variant']}, seed {run['seed']}, repeat {run['repeat']}",
            run,
            held_out_loss=".5f",
            last_training_losses=".5f",
        )
    for run in failed:
        print(f"{run['variant']}, seed {run['seed']}, repeat {run['repeat']}: {run['why']}")
    losses = {f"{key}_{what}": form for key in KEYS for what, form in GAP.items()}
    for row in gaps(runs, steps):
        show(f"{row['variant']}, gaps", row, runs="", **losses)
    for row in by_trunk(runs, steps):
        single = ", ".join(f"{gap:+.3%}" for gap in row["held_out_loss"])
        errors = {f"{key}_error": ".3%" for key in KEYS}
        show(f"{row['variant']}, held-out gaps of trunks: {single}", row, **errors)
    for row in noise(runs, steps):
        if row["freedom"]:
            show(f"{row['variant']}, from repeat to repeat", row, **dict.fromkeys(KEYS, ".3%"))


def plot(runs: Sequence[dict[str, Any]], steps: int, path: Path, first: int) -> None:
    """Each run's training loss relative to the mean of BF16's of the same seed, both averaged over
    :data:`LAST` steps, or a tenth of the run where that is less; thick: the mean of a variant's
    runs. A seed without BF16 is left out. ``first``: the step after which losses begin.

    Raises:
        ValueError: nothing is left to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = min(LAST, max(1, steps // 10))
    whole = [r for r in runs if r["steps"] == steps]
    based = {r["seed"] for r in whole if r["variant"] == BF16}
    whole = [r for r in whole if r["seed"] in based]
    if not whole:
        raise ValueError(
            f"plot: got no run of {steps} steps with one of {BF16} of its seed, accepted: at least "
            "one"
        )
    curves = {
        id(r): _smooth(r["losses"], max(1, width * len(r["losses"]) // (steps - first)))
        for r in whole
    }
    variants = list(dict.fromkeys(r["variant"] for r in whole))
    size = (2.6 * len(variants), 3)
    figure, axes = plt.subplots(
        1, len(variants), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, variant in zip(axes[0], variants, strict=True):
        gap = []
        for run in (r for r in whole if r["variant"] == variant):
            base = [
                curves[id(r)] for r in whole if r["variant"] == BF16 and r["seed"] == run["seed"]
            ]
            gap.append(
                [100 * (x / fmean(y) - 1) for x, *y in zip(curves[id(run)], *base, strict=True)]
            )
            at = [
                first + width // 2 + i * (steps - first) / len(run["losses"])
                for i in range(len(gap[-1]))
            ]
            axis.plot(at, gap[-1], linewidth=0.7, color="tab:orange" if run["seed"] else "tab:blue")
        axis.plot(
            at, [fmean(values) for values in zip(*gap, strict=True)], linewidth=2, color="black"
        )
        axis.set(title=variant.replace(", ", ",\n"), xlabel="step", ylim=(-1.5, 2.5))
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("training loss to BF16's, %")
    write_figure(path, figure, dpi=120)
    print("wrote", path)


def _smooth(values: Sequence[float], width: int) -> list[float]:
    return [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    return argument_parser(__doc__, result=None, plot=None).parse_args(given)


def main() -> None:
    arguments = parse()
    path = arguments.result or result_path("convergence/branches", arguments.output)
    with one_line():
        found = read_json(Path(path), "settings", "runs", "failed")
    settings = found["settings"]
    report(found["runs"], found["failed"], settings["steps"])
    if arguments.plot is not None:
        plot(found["runs"], settings["steps"], Path(arguments.plot), settings["branch_at"])


if __name__ == "__main__":
    main()
