"""What the runs of `benchmarks/convergence/flow.py` say together.

python -m benchmarks.convergence.flow_report [--result JSON] [--plot docs/figures/convergence-flow.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import one_line, picture
from benchmarks.common import read_result, result_path, write_figure

__all__ = ["BF16", "KEYS", "LAST", "gaps", "mean", "plot", "report"]

BF16 = "bf16"
"""The variant that all others are compared with."""
LAST = 200
"""Last steps of a run whose training losses are averaged."""
KEYS = {"held_out_loss": "held-out", "last_training_losses": "training"}
"""What is compared, and what it is called in print."""


def gaps(
    runs: Sequence[dict[str, Any]], steps: int, keys: Sequence[str] = tuple(KEYS), pair: str = "seed"
) -> list[dict[str, Any]]:
    """What each variant does to the losses ``keys``: by default the held-out one, and the mean of the last
    :data:`LAST` training losses.

    Of runs that made all ``steps``: the relative difference to BF16 over the seeds (or whatever of a run ``pair``
    names) that both have, its standard error (None where no run was repeated), and the number of runs on both sides.
    """
    values: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for run in runs:
        if run["steps"] == steps and run["held_out_loss"] is not None:
            values.setdefault((run["variant"], run[pair]), []).append(run)
    found = []
    for variant in dict.fromkeys(v for v, _ in values):
        seeds = [s for v, s in values if v == variant and (BF16, s) in values]
        if variant == BF16 or not seeds:
            continue
        row: dict[str, Any] = {"variant": variant, f"{pair}s": seeds}
        row["runs"] = [sum(len(values[v, s]) for s in seeds) for v in (variant, BF16)]
        for key in keys:
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


def report(
    runs: Sequence[dict[str, Any]],
    failed: Sequence[dict[str, Any]],
    steps: int,
    keys: Mapping[str, str] = KEYS,
    pair: str = "seed",
) -> None:
    """Print a line a run, what failed, and the gaps; see :func:`gaps`."""
    nan = float("nan")
    for run in (*runs, *failed):
        name = f"{run['variant']:<24} seed {run['seed']} repeat {run['repeat']}  "
        if "why" in run:
            print(f"{name}FAILED: {run['why']}")
        else:
            held_out = nan if run["held_out_loss"] is None else run["held_out_loss"]
            print(f"{name}held-out {held_out:.5f}  last {LAST} training losses {run['last_training_losses']:.5f}")
    for row in gaps(runs, steps, tuple(keys), pair):
        shown = [
            f"{what} {row[f'{key}_gap']:+.3%} ± {nan if row[f'{key}_error'] is None else row[f'{key}_error']:.3%}"
            for key, what in keys.items()
        ]
        mine, its = row["runs"]
        print(f"{row['variant']:<24} {', '.join(shown)}  ({mine} runs to {its} of BF16)")


def plot(runs: Sequence[dict[str, Any]], steps: int, path: Path, first: int = 0) -> None:
    """Each run's training loss relative to the mean of BF16's of the same seed, both averaged over :data:`LAST` steps,
    or a tenth of the run where that is less; thick: the mean of a variant's runs. A seed without BF16 is left out.
    ``first``: the step after which losses begin.

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
        raise ValueError(f"plot: got no run of {steps} steps with one of {BF16} of its seed, accepted: at least one")
    curves = {id(r): _smooth(r["losses"], max(1, width * len(r["losses"]) // (steps - first))) for r in whole}
    variants = list(dict.fromkeys(r["variant"] for r in whole))
    size = (2.6 * len(variants), 3)
    figure, axes = plt.subplots(1, len(variants), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, variant in zip(axes[0], variants, strict=True):
        gap = []
        for run in (r for r in whole if r["variant"] == variant):
            base = [curves[id(r)] for r in whole if r["variant"] == BF16 and r["seed"] == run["seed"]]
            gap.append([100 * (x / mean(y) - 1) for x, *y in zip(curves[id(run)], *base, strict=True)])
            at = [first + width // 2 + i * (steps - first) / len(run["losses"]) for i in range(len(gap[-1]))]
            axis.plot(at, gap[-1], linewidth=0.7, color="tab:orange" if run["seed"] else "tab:blue")
        axis.plot(at, [mean(values) for values in zip(*gap, strict=True)], linewidth=2, color="black")
        axis.set(title=variant.replace(", ", ",\n"), xlabel="step", ylim=(-1.5, 2.5))
        axis.axhline(0, color="0.6", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("training loss to BF16's, %")
    write_figure(path, figure, dpi=120)
    print("wrote", path)


def _smooth(values: Sequence[float], width: int) -> list[float]:
    return [mean(values[i : i + width]) for i in range(len(values) - width + 1)]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, default=result_path("convergence/flow"), metavar="JSON")
    parser.add_argument("--plot", type=picture, default=None, help="where to draw the curves")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with one_line():
        found = read_result(arguments.result, "settings", "runs", "failed")
    report(found["runs"], found["failed"], found["settings"]["steps"])
    if arguments.plot is not None:
        plot(found["runs"], found["settings"]["steps"], arguments.plot)


if __name__ == "__main__":
    main()
