"""Draw loss, throughput and memory of one or several runs.

python launch/plot.py runs/a runs/b --output loss.png
"""

from __future__ import annotations

import sys
from pathlib import Path

# A program started by its path has its own folder first on sys.path, where any `import data` would find ours.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.interrupts import leave_quietly, raise_again

if __name__ == "__main__":
    leave_quietly("plot")

import tempfile
from collections.abc import Sequence
from typing import Any

from launch.command_line import Parser, local_path, whole_number
from launch.training.metrics import read_metrics

__all__ = ["draw", "main"]

Records = list[dict[str, Any]]


def draw(runs: dict[str, Records], output: str | Path, smooth: int = 1) -> None:
    """Write a picture of three panels.

    Args:
        runs: records of ``metrics.jsonl`` by the name shown in the legend.
        output: file; its suffix chooses the format (.png, .pdf, .svg).
        smooth: steps of a trailing mean drawn over the loss; 1 = none.

    Raises:
        ValueError: a format that matplotlib does not write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, speed, memory) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for index, (name, records) in enumerate(runs.items()):
        color = f"C{index}"
        x, y = _series(records, "loss")
        loss.plot(
            x, y, color=color, alpha=0.35 if smooth > 1 else 1.0, label=None if smooth > 1 else name, linewidth=1.2
        )
        if smooth > 1:
            loss.plot(x, _trailing_mean(y, smooth), color=color, label=name, linewidth=1.5)
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
    for axis, title in ((loss, "loss"), (speed, "tokens/s/GPU"), (memory, "peak memory of rank 0, GiB")):
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    speed.set_ylim(bottom=0)
    memory.set_ylim(bottom=0)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def _series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a number under ``key``."""
    found = [(r["step"], float(r[key])) for r in records if isinstance(r.get(key), int | float)]
    return [s for s, _ in found], [v for _, v in found]


def _trailing_mean(values: list[float], window: int) -> list[float]:
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


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
    p = Parser(prog="plot.py", description="Draw loss, throughput and memory of one or several runs.")
    p.add_argument("runs", type=local_path, nargs="+", metavar="RUN", help="folder with metrics.jsonl, or such a file")
    p.add_argument("--output", type=local_path, default="loss.png", help="picture to write (.png, .pdf, .svg)")
    p.add_argument("--smooth", type=whole_number, default=1, metavar="STEPS", help="trailing mean of the loss")
    args = p.parse_args(argv)
    runs: dict[str, Records] = {}
    try:
        if args.smooth < 1:
            raise ValueError(f"--smooth: got {args.smooth}, accepted: an integer >= 1")
        _check_output(Path(args.output))
        for run in args.runs:
            path = Path(run)
            records = read_metrics(path)
            if not records:
                raise ValueError(f"{run}: holds no steps")
            name = path.name if path.is_dir() else path.parent.name or path.stem
            runs[name if name not in runs else run] = records
        draw(runs, Path(args.output), args.smooth)
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
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise_again()
    sys.exit(main())
