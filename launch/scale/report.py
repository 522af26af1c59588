"""Tables of an analysis, for a reader, and its picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw", "markdown", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _overlap(row: Mapping[str, Any]) -> str:
    if row["overlap"] is None:
        return "-"
    lost = f", less {1e6 * row['overlap_lost']:.0f} µs each" if row["overlap_lost"] else ""
    return f"{100 * row['overlap']:.0f} ± {100 * row['overlap_error']:.0f} %{lost}"


def _between(said: Mapping[str, float], scale: float = 1.0, digits: int = 1) -> str:
    low, middle, high = (f"{scale * said[key]:,.{digits}f}" for key in ("low", "middle", "high"))
    return f"{middle} ({low} to {high})"


def markdown(found: Mapping[str, Any]) -> str:
    """Everything, as one page."""
    identity = found["identity"]
    what = (
        f"{identity['world']} x {identity['device']} on {identity['nodes']} node{'s' if identity['nodes'] > 1 else ''}"
    )
    lines = ["# Scaling", ""]
    lines += [f"Measured on {what}; torch {identity['versions']['torch']}, backend {identity['backend']}."]
    if found["steps"]:
        lines += [
            "",
            f"Model {identity['model_name']}: micro-batch {identity['micro_batch']} of "
            f"{identity['model']['seq_length']} tokens, tensor-parallel {identity['tensor_parallel']}. Times are "
            "medians of steps; efficiency is against the fewest ranks.",
        ]
    for mode in ("weak", "strong"):
        rows = [row for row in found["steps"] if row["mode"] == mode]
        if not rows:
            continue
        lines += ["", f"## {mode.capitalize()} scaling", ""]
        lines += table(
            ("variant", "ranks", "micro-batches", "step, ms", "tokens/s", "tokens/s/GPU", "efficiency", "peak, GiB"),
            [
                (
                    row["variant"],
                    str(row["ranks"]),
                    str(row["accumulation"]),
                    f"{_milliseconds(row['seconds'])} ± {100 * row['spread']:.1f} %",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{row['tokens_per_second_per_gpu']:,.0f}",
                    f"{100 * row['efficiency']:.1f} %",
                    "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}",
                )
                for row in rows
            ],
        )
    if found["collectives"]:
        lines += ["", "## Collectives", "", "Latency of a hop and bandwidth of a rank, ± half of a 95 % interval.", ""]
        lines += table(
            (
                "collective",
                "ranks",
                "link",
                "latency, µs",
                "grows as",
                "bandwidth, GB/s",
                "scatter",
                "hidden behind products",
            ),
            [
                (
                    row["kind"].replace("_", "-"),
                    ", ".join(map(str, row["ranks"])),
                    {"inside": "in a node", "between": "between nodes"}[row["where"]],
                    f"{1e6 * row['latency']:.1f} ± {1e6 * row['latency_error']:.1f}",
                    " or ".join(row["shapes"]),
                    "not seen: latency is all"
                    if row["bandwidth"] is None
                    else f"{row['bandwidth'] / 1e9:.2f} ± {row['bandwidth_error'] / 1e9:.2f}",
                    f"{100 * row['scatter']:.0f} %",
                    _overlap(row),
                )
                for row in found["collectives"]
            ],
        )
    for variant, one in found["fits"].items():
        lines += [
            "",
            f"Steps, {variant}: {_milliseconds(one['micro_batch'])} ms a micro-batch, "
            f"{_milliseconds(one['update'])} ms of update, {100 * one['shows']:.0f} % of data parallelism's "
            "communication shows.",
        ]
        if one["shows"] - one["shows_error"] > 1:
            lines[-1] += _MORE_THAN_ALL
    if found["held_out"]:
        lines += ["", "## Predicted from fewer ranks, and measured", ""]
        lines += table(
            ("what", "ranks", "predicted, ms", "measured, ms", "in the range"),
            [
                (
                    row["what"],
                    str(row["ranks"]),
                    f"{1e3 * row['predicted']:,.3f} ({1e3 * row['low']:,.3f} to {1e3 * row['high']:,.3f})",
                    f"{1e3 * row['measured']:,.3f}",
                    "yes" if row["inside"] else "NO",
                )
                for row in found["held_out"]
            ],
        )
    if found["predictions"]:
        lines += ["", f"## Predicted: weak scaling, nodes of {found['gpus_per_node']}", ""]
        lines += table(
            ("variant", "ranks", "step, ms", "tokens/s", "tokens/s/GPU", "efficiency, %"),
            [
                (
                    row["variant"],
                    str(row["ranks"]),
                    _between(row["seconds"], 1e3),
                    _between(row["tokens_per_second"], digits=0),
                    _between(row["tokens_per_second_per_gpu"], digits=0),
                    _between(row["efficiency"], 100),
                )
                for row in found["predictions"]
            ],
        )
        lines += ["", _RANGES]
    for one in found["failed"]:
        lines += ["", f"Failed: {one['what']} {one.get('variant', '')} on {one['ranks']} ranks: {one['why']}"]
    for kind, why in found["missing"].items():
        lines += ["", f"Not measured: {kind}: {why}"]
    for what, why in found["left_out"].items():
        lines += ["", f"Left out: {what}: {why}"]
    return "\n".join(lines) + "\n"


_MORE_THAN_ALL = (
    " More than all of it cannot show: ranks slow each other in another way, such as by sharing cores, which this "
    "describes badly, and predictions of more ranks do not hold."
)
_RANGES = (
    "Ranges are 95 %: the scatter of the measurements and what it leaves open in the factors, every growth of latency "
    "that fits (or, of a link that was given, its bandwidth from 0.7 to 1.15), and waiting for the slowest rank. They "
    "do not know of congestion or of other jobs."
)


def draw(found: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], output: Path) -> None:
    """A picture of three panels: throughput over ranks, efficiency, times of collectives over sizes.

    Args:
        samples: measurements of collectives, each with ``kind``, ``ranks``, ``size`` and ``seconds``.
        output: file; its suffix chooses the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, efficiency, times) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    names = list(dict.fromkeys((row["variant"], row["mode"]) for row in found["steps"]))
    for index, (variant, mode) in enumerate(names):
        rows = [row for row in found["steps"] if (row["variant"], row["mode"]) == (variant, mode)]
        x, color = [row["ranks"] for row in rows], f"C{index}"
        speed.plot(x, [row["tokens_per_second"] for row in rows], "o-", color=color, label=f"{variant}, {mode}")
        efficiency.plot(x, [100 * row["efficiency"] for row in rows], "o-", color=color, label=f"{variant}, {mode}")
        ahead = [row for row in found["predictions"] if row["variant"] == variant and mode == "weak"]
        for axis, key, scale in ((speed, "tokens_per_second", 1), (efficiency, "efficiency", 100)):
            if ahead:
                x = [row["ranks"] for row in ahead]
                axis.plot(x, [scale * row[key]["middle"] for row in ahead], "--", color=color)
                low, high = ([scale * row[key][end] for row in ahead] for end in ("low", "high"))
                axis.fill_between(x, low, high, color=color, alpha=0.2, label=f"{variant}, predicted")
    groups = list(dict.fromkeys((one["kind"], one["ranks"]) for one in samples))
    for kind, ranks in groups:
        rows = sorted((s for s in samples if (s["kind"], s["ranks"]) == (kind, ranks)), key=lambda one: one["size"])
        label = f"{kind.replace('_', '-')}, {ranks}"
        times.plot(
            [row["size"] for row in rows], [1e6 * row["seconds"] for row in rows], ".-", label=label, linewidth=1
        )
    panels = (
        (speed, "ranks", "tokens/s"),
        (efficiency, "ranks", "efficiency, %"),
        (times, "bytes", "collectives, µs (ranks)"),
    )
    for axis, label, title in panels:
        axis.set(xlabel=label, title=title)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.set_xscale("log", base=2)
            axis.legend(fontsize=7)
    for axis, any_rows in ((speed, found["steps"]), (times, samples)):
        if any_rows:
            axis.set_yscale("log")
    figure.savefig(output, dpi=130)
    plt.close(figure)
