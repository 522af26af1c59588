"""Draw loss, throughput and memory of one or several runs, and how far their losses are from the
first one's.

python launch/plot.py runs/bf16 runs/coat --smooth 50 --gap --output loss.png
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.common.command_line import Parser, local_path, number
from launch.common.log_level import add_log_level, say, set_log_level

__all__ = ["draw", "gap", "main", "series", "smoothed"]

Records = list[dict[str, Any]]
_LOSSES = ("loss", "valid_loss", "test_loss")


def series(records: Records, key: str) -> dict[int, float]:
    """The finite numbers under ``key`` by step, in order; of a step that is there twice, the
    later record's.
    """
    found: dict[int, float] = {}
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            found[record["step"]] = float(value)
        else:
            found.pop(record["step"], None)
    return dict(sorted(found.items()))


def smoothed(values: Sequence[float], amount: float) -> list[float]:
    """Each value with those before it.

    Args:
        amount: 1 or more: the mean of so many values (of fewer at the beginning); below 1: an
            exponential moving average that gives the past this weight, as TensorBoard does, divided
            by the weights so far.
    """
    if amount >= 1:
        window, sums = int(amount), [0.0]
        for value in values:
            sums.append(sums[-1] + value)
        return [
            (sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window)
            for i in range(len(values))
        ]
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = amount * total + (1 - amount) * value, amount * weight + (1 - amount)
        result.append(total / weight)
    return result


@dataclass(frozen=True)
class Gap:
    """How far a run's loss is from a baseline's."""

    steps: list[int]  # steps at which both have a finite loss
    relative: list[float]  # (run - baseline) / baseline at these, of smoothed losses
    # Steps that one of the two does not have, beyond its end or before its beginning, too.
    one_only: int
    # Steps that both have, and at which a loss is missing, not finite or, of the baseline, zero.
    not_finite: int

    @property
    def at_the_end(self) -> float:
        """Mean over the last tenth of the steps."""
        last = self.relative[-max(1, len(self.relative) // 10) :]
        return sum(last) / len(last)


def gap(run: Records, baseline: Records, key: str = "loss", smooth: float = 1) -> Gap:
    """Compare two runs step by step, both :func:`smoothed` over the steps at which both have a
    loss.
    """
    ours, theirs = series(run, key), series(baseline, key)
    both = {r["step"] for r in run} & {r["step"] for r in baseline}
    either = {r["step"] for r in run} | {r["step"] for r in baseline}
    steps = [step for step, value in ours.items() if theirs.get(step)]
    a, b = (smoothed([values[step] for step in steps], smooth) for values in (ours, theirs))
    relative = [(x - y) / y for x, y in zip(a, b, strict=True)]
    return Gap(steps, relative, len(either - both), len(both) - len(steps))


def draw(
    runs: dict[str, Records], output: str | Path, smooth: float = 1, with_gap: bool = False
) -> list[str]:
    """Write a plot of three panels, or of four.

    Args:
        runs: records of ``metrics.jsonl`` by the name shown in the legend.
        output: file; its suffix chooses the format (.png, .pdf, .svg).
        smooth: of the line drawn over the loss, see :func:`smoothed`; 1 = none.
        with_gap: also draw how far the losses are from those of the first run.

    Returns:
        A line for each run that has no finite loss and, with ``with_gap``, for each but the first.

    Raises:
        ValueError: no finite loss, no common step, no such format, or the file, which stays as it
            was, is not writable.
    """
    without = [
        name for name, records in runs.items() if not any(series(records, key) for key in _LOSSES)
    ]
    if len(without) == len(runs):
        raise ValueError(
            f"{', '.join(without)}: no finite loss in any step, accepted: a run that has some"
        )
    from matplotlib.figure import Figure

    from coat_dist.checkpoint.write.durable import write_bytes

    panels = 4 if with_gap else 3
    figure = Figure(figsize=(5 * panels, 4.2), layout="constrained")
    loss, speed, memory, *more = figure.subplots(1, panels)
    notes = [f"{name}: no finite loss in any step" for name in without]
    notes += _draw_gap(more[0], runs, smooth) if with_gap else []
    for index, (name, records) in enumerate(runs.items()):
        line: dict[str, Any] = {"color": f"C{index}", "label": name, "linewidth": 1.2}
        _draw_losses(loss, records, line, smooth)
        _plot(speed, series(records, "tokens_per_second_per_gpu"), **line)
        _plot(
            memory, {k: v / 2**30 for k, v in series(records, "peak_memory_bytes").items()}, **line
        )
    titles = (
        "loss",
        "tokens/s/rank",
        "peak memory of rank 0, GiB",
        "loss against the first run, %",
    )
    for axis, title in zip((loss, speed, memory, *more), titles, strict=False):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    memory.set_ylim(0, 1.15 * memory.get_ylim()[1])  # a line that is flat would lie on the frame
    plot = io.BytesIO()  # the file is written atomically
    figure.savefig(plot, format=Path(output).suffix[1:], dpi=130)
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(Path(os.path.realpath(output)), plot.getvalue())
    except OSError as problem:
        raise ValueError(
            f"--output: got {output}, accepted: a file to write to ({problem.strerror})"
        ) from problem
    return notes


def _plot(axis: Any, values: dict[int, float], *style: str, **more: Any) -> None:
    axis.plot(list(values), list(values.values()), *style, **more)


def _draw_losses(axis: Any, records: Records, line: dict[str, Any], smooth: float) -> None:
    """Draw training loss, smoothed loss, evaluations and skipped steps of a run."""
    losses, color, name = series(records, "loss"), line["color"], line["label"]
    if smooth == 1:
        _plot(axis, losses, **line)
    else:
        _plot(axis, losses, color=color, alpha=0.35, linewidth=1.2)
        axis.plot(
            list(losses),
            smoothed(list(losses.values()), smooth),
            color=color,
            label=name,
            linewidth=1.5,
        )
    for key, marker in (("valid_loss", "o"), ("test_loss", "*")):
        if found := series(records, key):
            label = f"{name}, {key.removesuffix('_loss')}"
            _plot(axis, found, marker, color=color, markersize=5, label=label)
    if skipped := {record["step"]: 0.02 for record in records if record.get("skipped")}:
        _plot(
            axis,
            skipped,
            "x",
            color=color,
            transform=axis.get_xaxis_transform(),
            label=f"{name}, skipped",
        )


def _draw_gap(axis: Any, runs: dict[str, Records], smooth: float) -> list[str]:
    """Draw the relative difference of losses to the first run's; a line that says what was
    compared for each other.
    """
    (first, baseline), *others = runs.items()
    notes = []
    for index, (name, records) in enumerate(others, 1):
        found, valid = gap(records, baseline, smooth=smooth), gap(records, baseline, "valid_loss")
        if not found.steps:
            raise ValueError(f"--gap: {name} and {first} have no step at which both have a loss")
        color = f"C{index}"
        axis.plot(
            found.steps, [100 * x for x in found.relative], color=color, label=name, linewidth=1.2
        )
        if valid.steps:
            axis.plot(
                valid.steps,
                [100 * x for x in valid.relative],
                "o",
                color=color,
                label=f"{name}, valid",
            )
        notes.append(
            f"{name} against {first}: {100 * found.at_the_end:+.3f} % over the last tenth of "
            f"{len(found.steps)} common "
            f"steps ({found.steps[0]} to {found.steps[-1]}); left out: {found.one_only} steps of "
            "one run only, "
            f"{found.not_finite} without a finite loss"
        )
    axis.axhline(0.0, color="C0", linewidth=1.2, label=first)
    return notes


def _check_output(path: Path) -> None:
    """Refuse to replace a file that is no plot."""
    begin = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}.get(path.suffix.lower(), b"")
    if path.is_file() and path.stat().st_size and not path.read_bytes().startswith(begin):
        raise ValueError(
            f"--output: got {path}, which is no {path.suffix} plot, accepted: another file"
        )


def _named(folders: Sequence[str]) -> dict[str, Records]:
    """Records of runs by their folders' names, or by their paths where two have the same name."""
    from launch.train.metrics import read_metrics

    paths = [Path(one).resolve() for one in folders]
    names = [(path if path.is_dir() else path.parent).name for path in paths]
    runs = {}
    for given, path, name in zip(folders, paths, names, strict=True):
        if not (records := read_metrics(path)):
            raise ValueError(f"{given}: holds no steps")
        runs[name if names.count(name) == 1 else given] = records
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """The program; the exit status."""
    p = Parser(
        prog="plot.py", description="Draw loss, throughput and memory of one or several runs."
    )
    p.add_argument(
        "runs",
        type=local_path,
        nargs="+",
        metavar="RUN",
        help="folder with metrics.jsonl, or such a file",
    )
    p.add_argument(
        "--output", type=local_path, default="loss.png", help="plot to write (.png, .pdf, .svg)"
    )
    smooth = (
        "of the loss: a whole number is a mean over so many steps; 0.9, say, an exponential "
        "moving average with "
    )
    smooth += "that weight on the past, as in TensorBoard"
    p.add_argument("--smooth", type=number, default=1, metavar="STEPS|WEIGHT", help=smooth)
    gap_help = (
        "a fourth panel: relative difference of (smoothed) losses to the first run's, step by step"
    )
    p.add_argument("--gap", action="store_true", help=gap_help)
    add_log_level(p)
    args = p.parse_args(argv)
    set_log_level(args.log_level)
    try:
        if args.smooth <= 0:
            raise ValueError(
                f"--smooth: got {args.smooth:g}, accepted: steps, or a weight between 0 and 1"
            )
        _check_output(Path(args.output))
        notes = draw(_named(args.runs), args.output, args.smooth, args.gap)
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plot: interrupted", file=sys.stderr)
        return 130
    for line in [*notes, f"wrote {args.output}"]:
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
