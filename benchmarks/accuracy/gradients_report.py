"""Tables and the picture of what `benchmarks/accuracy/gradients.py` measured.

python -m benchmarks.accuracy.gradients_report [--result JSON ...] [--plot docs/figures/accuracy-gradients.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.gradient_variants import variants
from benchmarks.arguments import one_line, picture
from benchmarks.common import read_result, result_path, write_figure

__all__ = ["KINDS", "REFERENCES", "plot", "records", "show"]

KINDS = "qkv", "proj", "fc1", "fc2", "norms", "embedding", "output"
REFERENCES = "exact", "straight through"
Record = dict[str, Any]


def records(found: dict[str, Any]) -> list[Record]:
    """Rows of a result, each with the exact gradient's norms beside its own values."""
    return [row | found["exact"] for row in found["rows"]]


def show(rows: Sequence[Record]) -> None:
    """Bias, noise and gain in percent."""
    kinds = [*KINDS, "all"]
    for reference in REFERENCES:
        for value, text in (("bias", bias_text), ("noise", noise_text), ("gain", gain_text)):
            print(f"== {value}, %, against {reference}\n{'':<38}" + "".join(f"{kind:>12}" for kind in kinds))
            for row in (r for r in rows if r["reference"] == reference):
                print(f"{row['variant']:<38}" + "".join(f"{text(row, kind):>12}" for kind in kinds), flush=True)


def bias(record: Record, kind: str) -> tuple[float, float] | None:
    """Squares of the bias and of its standard error, relative to the mean exact gradient, if that is not nothing."""
    mean2 = record[f"{kind} mean2"]
    return (record[f"{kind} bias2"] / mean2, record[f"{kind} bias2_error"] / mean2) if mean2 > 0 else None


def bias_text(record: Record, kind: str) -> str:
    """Bias and its standard error in percent of the mean exact gradient; below two standard errors of the square it is
    given as a bound."""
    found = bias(record, kind)
    if found is None:
        return "-"
    square, error = found
    if square <= 2 * error:
        return f"<{100 * max(square + 2 * error, 0) ** 0.5:.2f}"
    return f"{100 * square**0.5:.2f}±{100 * error / (2 * square**0.5):.2f}"


def noise(record: Record, kind: str) -> float:
    """Noise in percent of the root mean square of a batch's exact gradient."""
    return 100 * (record[f"{kind} noise2"] / (record[f"{kind} mean2"] + record[f"{kind} spread2"])) ** 0.5


def noise_text(record: Record, kind: str) -> str:
    """:func:`noise` with two decimals."""
    return f"{noise(record, kind):.2f}"


def gain_text(record: Record, kind: str) -> str:
    """The part of the bias along the exact gradient, in percent."""
    return f"{100 * record[f'{kind} gain']:.2f}±{100 * record[f'{kind} gain_error']:.2f}"


def plot(rows: Sequence[Record], path: Path) -> None:
    """Bias and noise of single roundings against "exact", and of candidates against "straight through"; of rows of the
    same name the first."""
    first: dict[tuple[str, str], Record] = {}
    for row in rows:
        first.setdefault((row["reference"], row["variant"]), row)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [(REFERENCES[0], "roundings"), (REFERENCES[1], "candidates")]
    parts = [
        [r for (given, name), r in first.items() if given == reference and name in variants([one], layers=1)]
        for reference, one in drawn
    ]
    figure, axes = plt.subplots(
        2, 2, figsize=(11, 0.26 * sum(map(len, parts)) + 1.6), layout="constrained", sharey="row", sharex="col",
        height_ratios=[len(part) + 1 for part in parts],
    )  # fmt: skip
    for (reference, _), part, (left, right) in zip(drawn, parts, axes, strict=True):
        for kind, marker in zip(KINDS[:4], "os^v", strict=True):
            biases = [(i, bias(r, kind)) for i, r in enumerate(part)]
            shown = [(i, 100 * b[0] ** 0.5) for i, b in biases if b and b[0] > 2 * b[1]]
            style: dict[str, Any] = {"marker": marker, "linestyle": "none", "markersize": 5, "label": kind}
            left.plot([x for _, x in shown], [i for i, _ in shown], **style)
            right.plot([noise(r, kind) for r in part], range(len(part)), **style)
        left.set(yticks=range(len(part)), title=f"bias against {reference}", ylim=(len(part) - 0.5, -0.5))
        left.set_yticklabels([r["variant"] for r in part], fontsize=8)
        right.set(title=f"noise against {reference}")
        for axis in (left, right):
            axis.set_xlim(left=0)
            axis.grid(alpha=0.3)
    axes[1][0].set(xlabel="% of the mean exact gradient (left out: below two standard errors)")
    axes[1][1].set(xlabel="% of a batch's exact gradient")
    axes[0][1].legend(fontsize=8)
    write_figure(path, figure, dpi=80)
    plt.close(figure)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    files = [result_path(f"accuracy/{name}") for name in ("gradients", "gradients-candidates")]
    parser.add_argument("--result", type=Path, nargs="+", default=files, metavar="JSON")
    parser.add_argument("--plot", type=picture, help="where to draw the picture")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    with one_line():
        results = [read_result(file, "exact", "rows") for file in arguments.result]
    rows = [row for found in results for row in records(found)]
    show(rows)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
