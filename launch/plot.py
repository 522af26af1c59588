"""Draw loss, throughput and memory of one or several runs, and how far their losses are from the first one's.

python launch/plot.py runs/bf16 runs/coat --smooth 50 --gap --output loss.png
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])


import io
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from coat_dist.checkpoint.write.durable import write_bytes
from launch.command_line import Parser, local_path, number
from launch.compare_runs import gap, series, smoothed
from launch.log_level import add_log_level, say, set_log_level
from launch.train.metrics import read_metrics

__all__ = ["draw", "main"]

Records = list[dict[str, Any]]
_LOSSES = ("loss", "valid_loss", "test_loss")


def draw(runs: dict[str, Records], output: str | Path, smooth: float = 1, with_gap: bool = False) -> list[str]:
    """Write a picture of three panels, or of four.

    Args:
        runs: records of ``metrics.jsonl`` by the name shown in the legend.
        output: file; its suffix chooses the format (.png, .pdf, .svg).
        smooth: of the line drawn over the loss, see :func:`launch.compare_runs.smoothed`; 1 = none.
        with_gap: also draw how far the losses are from those of the first run.

    Returns:
        A line for each run that has no finite loss and, with ``with_gap``, for each but the first.

    Raises:
        ValueError: no run has a finite loss; a format that matplotlib does not write; runs without a common step;
            the file cannot be written, and is what it was before.
    """
    without = [name for name, records in runs.items() if not any(series(records, key) for key in _LOSSES)]
    if len(without) == len(runs):
        raise ValueError(f"{', '.join(without)}: no finite loss in any step, accepted: a run that has some")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = 4 if with_gap else 3
    figure, (loss, speed, memory, *more) = plt.subplots(1, panels, figsize=(5 * panels, 4.2), layout="constrained")
    said = [f"{name}: no finite loss in any step" for name in without]
    said += _draw_gap(more[0], runs, smooth) if with_gap else []
    for index, (name, records) in enumerate(runs.items()):
        color = f"C{index}"
        x, y = _series(records, "loss")
        loss.plot(
            x, y, color=color, alpha=0.35 if smooth != 1 else 1.0, label=None if smooth != 1 else name, linewidth=1.2
        )
        if smooth != 1:
            loss.plot(x, smoothed(y, smooth), color=color, label=name, linewidth=1.5)
        for key, marker in (("valid_loss", "o"), ("test_loss", "*")):
            x, y = _series(records, key)
            if x:
                loss.plot(x, y, marker, color=color, markersize=5, label=f"{name}, {key.removesuffix('_loss')}")
        skipped = [r["step"] for r in records if r.get("skipped")]
        if skipped:
            loss.plot(
                skipped,
                [0.02] * len(skipped),
                "x",
                color=color,
                transform=loss.get_xaxis_transform(),
                label=f"{name}, skipped",
            )
        x, y = _series(records, "tokens_per_second_per_gpu")
        speed.plot(x, y, color=color, label=name, linewidth=1.2)
        x, y = _series(records, "peak_memory_bytes")
        memory.plot(x, [v / 2**30 for v in y], color=color, label=name, linewidth=1.2)
    titles = ("loss", "tokens/s/GPU", "peak memory of rank 0, GiB", "loss against the first run, %")
    for axis, title in zip((loss, speed, memory, *more), titles, strict=False):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    memory.set_ylim(0, 1.15 * memory.get_ylim()[1])  # a line that is flat would lie on the frame
    path = Path(os.path.realpath(output))
    picture = io.BytesIO()  # on a full disk matplotlib's own writing ends in errors of any kind
    figure.savefig(picture, format=Path(output).suffix[1:], dpi=130)  # a link may lead to any name
    plt.close(figure)
    try:
        write_bytes(path, picture.getvalue())
    except OSError as problem:
        raise ValueError(f"--output: {output}: cannot be written ({problem.strerror})") from problem
    return said


def _draw_gap(axis: Any, runs: dict[str, Records], smooth: float) -> list[str]:
    """Draw the relative difference of losses to the first run's; a line that says what was compared for each other."""
    (first, baseline), *others = runs.items()
    said = []
    for index, (name, records) in enumerate(others, 1):
        found = gap(records, baseline, smooth=smooth)
        if not found.steps:
            raise ValueError(f"--gap: {name} and {first} have no step at which both have a loss")
        axis.plot(found.steps, [100 * x for x in found.relative], color=f"C{index}", label=name, linewidth=1.2)
        valid = gap(records, baseline, "valid_loss")
        if valid.steps:
            axis.plot(
                valid.steps,
                [100 * x for x in valid.relative],
                "o",
                color=f"C{index}",
                markersize=5,
                label=f"{name}, valid",
            )
        said.append(
            f"{name} against {first}: {100 * found.at_the_end:+.3f} % over the last tenth of {len(found.steps)} common "
            f"steps ({found.steps[0]} to {found.steps[-1]}); left out: {found.one_only} steps of one run only, "
            f"{found.not_finite} without a finite loss"
        )
    axis.axhline(0.0, color="C0", linewidth=1.2, label=first)
    return said


def _series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a finite number under ``key``."""
    found = series(records, key)
    return list(found), list(found.values())


def _check_output(path: Path) -> None:
    """Refuse a name without a format, to which matplotlib adds one, a file that is no picture of its format, and a
    place that cannot be written."""
    from matplotlib.backend_bases import FigureCanvasBase

    def refuse(what: str, accepted: str) -> None:
        raise ValueError(f"--output: got {path}, {what}accepted: {accepted}")

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if not path.suffix:
        refuse("", "a file name that ends in .png, .pdf, .svg")
    if path.suffix[1:].lower() not in formats:
        refuse("", f"a file name that ends in one of {', '.join(formats)}")
    begin = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}.get(path.suffix.lower(), b"")
    try:
        if path.is_dir():
            refuse("which is a folder, ", "a file")
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(begin)) != begin and path.stat().st_size:
                    refuse(f"which is there and no {path.suffix} picture, ", "another")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as problem:
        refuse("", f"a file to write to ({problem})")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; the exit status."""
    p = Parser(
        prog="plot.py",
        description="Draw loss, throughput and memory of one or several runs.",
        meant={"smoothing": "--smooth", "baseline": "--gap", "out": "--output"},
    )
    p.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help="folder with metrics.jsonl, or such a file")
    p.add_argument("--output", type=local_path, default="loss.png", help="picture to write (.png, .pdf, .svg)")
    p.add_argument(
        "--smooth",
        type=number,
        default=1,
        metavar="STEPS|WEIGHT",
        help="of the loss: a whole number is a mean over so many steps; 0.9, say, an exponential moving average with "
        "that weight on the past, as in TensorBoard",
    )
    p.add_argument(
        "--gap",
        action="store_true",
        help="a fourth panel: relative difference of (smoothed) losses to the first run's, step by step",
    )
    add_log_level(p)
    args = p.parse_args(argv)
    set_log_level(args.log_level)
    runs: dict[str, Records] = {}
    try:
        if not (0 < args.smooth < 1 or (args.smooth >= 1 and args.smooth == int(args.smooth))):
            raise ValueError(
                f"--smooth: got {args.smooth:g}, accepted: an integer >= 1 (steps), or a weight between 0 and 1"
            )
        if args.gap and len(args.runs) < 2:
            raise ValueError("--gap: got one run, accepted: two or more, the baseline first")
        _check_output(Path(args.output))
        for run in args.runs:
            path = Path(run)
            records = read_metrics(path)
            if not records:
                raise ValueError(f"{run}: holds no steps")
            folder = path if path.is_dir() else path.parent
            name = folder.name or folder.resolve().name or path.stem  # "." has no name
            while name in runs:
                name = run if run not in runs else f"{name}'"
            runs[name] = records
        said = draw(runs, Path(args.output), args.smooth, args.gap)
    except FileNotFoundError as problem:
        print(
            f"error: {problem.filename} does not exist, accepted: a folder with metrics.jsonl, or such a file",
            file=sys.stderr,
        )
        return 2
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plot: interrupted", file=sys.stderr)
        return 130
    for line in [*said, f"wrote {args.output}"]:
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
