"""Draw loss, throughput and memory of one or several runs, and how far their losses are from the
first one's.

python launch/plot.py runs/bf16 runs/coat --smooth 50 --gap --output loss.png

TensorBoard (``pretrain.py --tensorboard DIR``) draws the same numbers while a run goes on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.common.command_line import Parser, local_path, whole_number
from launch.common.log_level import add_log_level, say, set_log_level

Records = list[dict[str, Any]]
PANELS = {
    "loss": "loss",
    "tokens_per_second_per_gpu": "tokens/s/rank",
    "peak_memory_bytes": "peak memory of rank 0, bytes",
}


def series(records: Records, key: str) -> dict[int, float]:
    """The finite numbers under ``key`` by step; of a step that is there twice, the later one."""
    found = {record["step"]: record.get(key) for record in records}
    return {step: x for step, x in sorted(found.items()) if x is not None and math.isfinite(x)}


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to ``window - 1`` values before it."""
    found = []
    for end in range(1, len(values) + 1):
        last = values[max(0, end - window) : end]
        found.append(sum(last) / len(last))
    return found


def gap(run: Records, baseline: Records, window: int) -> dict[int, float]:
    """(run - baseline) / baseline of smoothed losses, at the steps at which both have one."""
    ours, theirs = series(run, "loss"), series(baseline, "loss")
    steps = [step for step in ours if theirs.get(step)]
    own = smoothed([ours[step] for step in steps], window)
    other = smoothed([theirs[step] for step in steps], window)
    return {step: (x - y) / y for step, x, y in zip(steps, own, other, strict=True)}


def draw(runs: dict[str, Records], output: str, window: int = 1, with_gap: bool = False) -> None:
    """Write a plot of three panels, or of four.

    Args:
        runs: records of ``metrics.jsonl`` by the name shown in the legend.
        output: file; its suffix chooses the format (.png, .pdf, .svg).
        window: steps that a loss is the mean of.
        with_gap: also draw, and print, how far the losses are from those of the first run.

    Raises:
        ValueError: a run without a finite loss, or no such format.
        OSError: the file is not writable.
    """
    from matplotlib.figure import Figure

    titles = [*PANELS.values(), *["loss against the first run, %"] * with_gap]
    figure = Figure(figsize=(5 * len(titles), 4.2), layout="constrained")
    axes = figure.subplots(1, len(titles))
    first, baseline = next(iter(runs.items()))
    for number, (name, records) in enumerate(runs.items()):
        style = {"color": f"C{number}", "label": name}
        for axis, key in zip(axes, PANELS, strict=False):
            found = series(records, key)
            if key == "loss" and not found:
                raise ValueError(
                    f"{name}: no finite loss in any step, accepted: a run that has one"
                )
            axis.plot(list(found), smoothed(list(found.values()), window), **style)
        for key, marker in (("valid_loss", "o"), ("test_loss", "*")):
            found = series(records, key)
            axes[0].plot(list(found), list(found.values()), marker, color=style["color"])
        if with_gap:
            apart = gap(records, baseline, window)
            if not apart:
                raise ValueError(
                    f"--gap: {name} and {first} have no step at which both have a loss"
                )
            axes[-1].plot(list(apart), [100 * x for x in apart.values()], **style)
            last = list(apart.values())[-max(1, len(apart) // 10) :]
            mean = 100 * sum(last) / len(last)
            say(f"{name} against {first}: {mean:+.3f} %, last tenth of {len(apart)} common steps")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[1].set_ylim(bottom=0)
    axes[2].set_ylim(bottom=0)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """The program; the exit status."""
    p = Parser(prog="plot.py", description=(__doc__ or "").partition("\n\n")[0])
    run = "folder with metrics.jsonl, or such a file"
    p.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help=run)
    output = "plot to write (.png, .pdf, .svg)"
    p.add_argument("--output", type=local_path, default="loss.png", help=output)
    smooth = "draw means of so many steps"
    p.add_argument("--smooth", type=whole_number, default=1, metavar="STEPS", help=smooth)
    panel = "a fourth panel: relative difference of losses to the first run's, step by step"
    p.add_argument("--gap", action="store_true", help=panel)
    add_log_level(p)
    args = p.parse_args(argv)
    set_log_level(args.log_level)
    from launch.train.metrics import read_metrics

    try:
        runs = {str(Path(given)): read_metrics(given) for given in args.runs}
        draw(runs, args.output, max(1, args.smooth), args.gap)
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    say(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
