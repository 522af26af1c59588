"""What the branches of `benchmarks/convergence/branches.py` say together.

python -m benchmarks.convergence.branch_report [--result JSON] [--plot docs/figures/convergence-branches.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import one_line, picture
from benchmarks.common import read_result, result_path
from benchmarks.convergence import flow_report
from benchmarks.convergence.flow_report import BF16, gaps, mean

__all__ = ["KEYS", "PAIR", "by_trunk", "noise", "report"]

KEYS = {
    "held_out_loss": "held-out",
    "bf16_held_out_loss": "in BF16",
    "averaged_held_out_loss": "averaged",
    "averaged_bf16_held_out_loss": "averaged, in BF16",
    "last_training_losses": "training",
}
"""What is compared, and what it is called in print. "in BF16": the same weights in BF16 layers."""
PAIR = "trunk"
"""What two branches have in common that are compared."""


def noise(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """How far repeats are apart, for each variant that has some: standard deviation of a branch around the mean of its
    trunk and variant, pooled over trunks, relative to the loss; and the mean of ``distance``."""
    whole = [r for r in runs if r["steps"] == steps]
    found = []
    for variant in dict.fromkeys(r["variant"] for r in whole):
        mine = [r for r in whole if r["variant"] == variant]
        groups = [[r for r in mine if r[PAIR] == trunk] for trunk in dict.fromkeys(r[PAIR] for r in mine)]
        freedom = sum(len(group) - 1 for group in groups)
        apart = [r["distance"] for r in mine if r.get("distance")]  # the branch that others are measured from has 0
        row: dict[str, Any] = {"variant": variant, "distance": mean(apart) if apart else None, "freedom": freedom}
        for key in KEYS if freedom else ():
            squares = sum((r[key] - mean([g[key] for g in group])) ** 2 for group in groups for r in group)
            row[key] = (squares / freedom) ** 0.5 / mean([r[key] for r in mine])
        found.append(row)
    return found


def by_trunk(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The gaps of each variant in each trunk alone, and the standard error of their mean that their own spread gives.

    It needs no repeats, and holds whatever they have in common, also where they are nearly the same run.
    """
    found: dict[str, dict[str, Any]] = {}
    for trunk in dict.fromkeys(r[PAIR] for r in runs):
        for gap in gaps([r for r in runs if r[PAIR] == trunk], steps, tuple(KEYS), PAIR):
            row = found.setdefault(gap["variant"], {"variant": gap["variant"], "trunks": [], **{k: [] for k in KEYS}})
            row["trunks"].append(trunk)
            for key in KEYS:
                row[key].append(gap[f"{key}_gap"])
    for row in found.values():
        n = len(row["trunks"])
        for key in KEYS:
            squares = sum((gap - mean(row[key])) ** 2 for gap in row[key])
            row[f"{key}_error"] = (squares / (n - 1) / n) ** 0.5 if n > 1 else None
    return list(found.values())


def report(runs: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], steps: int) -> None:
    """Print a line a branch, what failed, the gaps, those of each trunk, and what repeats differ by."""
    flow_report.report(runs, failed, steps, KEYS, PAIR)
    for row in by_trunk(runs, steps):
        single = ", ".join(f"{gap:+.3%}" for gap in row["held_out_loss"])
        print(f"{row['variant']:<24} held-out, trunk by trunk: {single}")
        if len(row["trunks"]) > 1:
            errors = ", ".join(f"{what} {row[f'{key}_error']:.3%}" for key, what in KEYS.items())
            print(f"{row['variant']:<24} errors from the spread of trunks: {errors}")
    for row in noise(runs, steps):
        if row["freedom"]:
            apart = "" if row["distance"] is None else f", distance {row['distance']:.2f} from the first of {BF16}"
            shown = ", ".join(f"{what} {row[key]:.3%}" for key, what in KEYS.items())
            print(f"{row['variant']:<24} from repeat to repeat: {shown}{apart}")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=result_path("convergence/branches"), metavar="JSON")
    parser.add_argument("--plot", type=picture, default=None, help="where to draw the curves")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with one_line():
        found = read_result(arguments.result, "settings", "runs", "failed")
    settings = found["settings"]
    report(found["runs"], found["failed"], settings["steps"])
    if arguments.plot is not None:
        flow_report.plot(found["runs"], settings["steps"], arguments.plot, settings["branch_at"])


if __name__ == "__main__":
    main()
