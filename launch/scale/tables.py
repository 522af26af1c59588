"""Tables of measured scaling."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def _table(head: str, rows: Iterable[str]) -> list[str]:
    """Lines of a Markdown table; cells are separated by " | "."""
    return [
        "",
        f"| {head} |",
        "|" + "---|" * (1 + head.count(" | ")),
        *(f"| {row} |" for row in rows),
    ]


def spread_of(seconds: Sequence[float]) -> float:
    """Relative standard deviation, from the middle half of the steps: a disturbed step does not
    count.
    """
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 1.349 / statistics.median(seconds)


def steps(there: Mapping[str, Any], mode: str) -> list[dict[str, Any]]:
    """Rows of "weak" or "strong" scaling, each with its efficiency against the fewest ranks.

    Weak scaling keeps a rank's micro-batches, strong scaling those of all ranks together.
    """
    identity, rows = there["identity"], []
    for one in there["records"]:
        for measured in one.get("steps", ()):
            ranks, key, accumulation = one["ranks"], one["key"], measured["accumulation"]
            weak = identity["accumulation"]
            if mode == "weak" and accumulation != weak:
                continue
            if mode == "strong" and not (
                key["strong"] and accumulation * ranks == weak * key["most"]
            ):
                continue
            seconds = statistics.median(measured["seconds"])
            samples = identity["micro_batch"] * accumulation * ranks / identity["tensor_parallel"]
            row = {
                "variant": key["variant"],
                "ranks": ranks,
                "accumulation": accumulation,
                "seconds": seconds,
                "spread": spread_of(measured["seconds"]),
                "tokens_per_second": samples * identity["model"]["seq_length"] / seconds,
                "peak_memory_bytes": one["peak_memory_bytes"],
            }
            rows.append(row | {"per_gpu": row["tokens_per_second"] / ranks})
    order = list(identity["settings"])
    rows.sort(key=lambda row: (order.index(row["variant"]), row["ranks"]))
    fewest = {row["variant"]: row["per_gpu"] for row in reversed(rows)}
    return [row | {"efficiency": row["per_gpu"] / fewest[row["variant"]]} for row in rows]


def markdown(there: Mapping[str, Any]) -> str:
    """All tables of ``measured.json``, as one page."""
    identity, model = there["identity"], there["identity"]["model"]
    largest = max(there["records"], key=lambda record: record["ranks"])
    nodes = -(-largest["ranks"] // largest["a_node"])
    lines = [
        "# Scaling",
        "",
        f"Measured on up to {largest['ranks']} x {identity['device']} on {nodes} "
        f"node{'s' if nodes > 1 else ''}; torch {identity['versions']['torch']}.",
        "",
        f"Model {identity['model_name']}: micro-batch {identity['micro_batch']} of "
        f"{model['seq_length']} tokens, vocabulary {model['vocab_size']}, tensor-parallel "
        f"{identity['tensor_parallel']}. Times are medians of steps; efficiency is against the "
        "fewest ranks.",
    ]
    for mode in ("weak", "strong"):
        if rows := steps(there, mode):
            head = (
                "variant | ranks | micro-batches | step, ms | tokens/s | tokens/s/GPU | "
                "efficiency | peak, GiB"
            )
            lines += [
                "",
                f"## {mode.capitalize()} scaling",
                *_table(head, map(_step_cells, rows)),
            ]
    return "\n".join(lines) + "\n"


def _step_cells(row: Mapping[str, Any]) -> str:
    peak = "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}"
    return (
        f"{row['variant']} | {row['ranks']} | {row['accumulation']} | {1e3 * row['seconds']:,.1f} "
        f"± {100 * row['spread']:.1f} % | {row['tokens_per_second']:,.0f} | {row['per_gpu']:,.0f} "
        f"| {100 * row['efficiency']:.1f} % | {peak}"
    )
