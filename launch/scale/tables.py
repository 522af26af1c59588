"""Tables of measured scaling."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .collective_timing import share

__all__ = ["collectives", "markdown", "spread_of", "steps"]


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
            kept = accumulation == identity["accumulation"]
            if mode == "strong":
                whole = identity["accumulation"] * key["most"]
                kept = key["strong"] and accumulation * ranks == whole
            if not kept:
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


def collectives(there: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each group of ranks and kind: the smallest and the largest message."""
    for record in there["records"]:
        a_node, nodes = record["a_node"], -(-record["ranks"] // record["a_node"])
        where = "in a node" if nodes == 1 else f"{nodes} nodes"
        samples = record.get("samples", ())
        for kind in dict.fromkeys(one["kind"] for one in samples):
            own = [one for one in samples if one["kind"] == kind]
            first, last = (end(own, key=lambda one: one["size"]) for end in (min, max))
            yield {
                "kind": kind,
                "ranks": last["ranks"],
                "where": "between nodes" if nodes > 1 and a_node == 1 else where,
                "smallest_bytes": first["size"],
                "smallest_seconds": first["seconds"],
                "largest_bytes": last["size"],
                "bandwidth": last["size"] * share(kind, last["ranks"]) / last["seconds"],
            }


def markdown(there: Mapping[str, Any]) -> str:
    """All tables of ``measured.json``, as one page."""
    identity = there["identity"]
    nodes = f"{identity['nodes']} node{'s' if identity['nodes'] > 1 else ''}"
    lines = [
        "# Scaling",
        "",
        f"Measured on {identity['world']} x {identity['device']} on {nodes}; "
        f"torch {identity['versions']['torch']}.",
    ]
    if "model" in identity:
        model = identity["model"]
        lines += [
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
    if found := list(collectives(there)):
        ends = (_bytes(found[0][f"{end}_bytes"]) for end in ("smallest", "largest"))
        lines += [
            "",
            "## Collectives",
            "",
            "Messages of {} for latency and {} for bandwidth.".format(*ends),
            *_table(
                "collective | ranks | link | latency, µs | bandwidth, GB/s",
                map(_collective_cells, found),
            ),
        ]
    for one in there["records"]:
        if "failed" in one:
            what = f"{one['key']['what']} {one['key'].get('variant', '')}"
            lines += ["", f"Failed: {what} on {one['ranks']} ranks: {one['failed']}"]
    return "\n".join(lines) + "\n"


def _step_cells(row: Mapping[str, Any]) -> str:
    peak = "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}"
    return (
        f"{row['variant']} | {row['ranks']} | {row['accumulation']} | {1e3 * row['seconds']:,.1f} "
        f"± {100 * row['spread']:.1f} % | {row['tokens_per_second']:,.0f} | {row['per_gpu']:,.0f} "
        f"| {100 * row['efficiency']:.1f} % | {peak}"
    )


def _collective_cells(row: Mapping[str, Any]) -> str:
    return (
        f"{row['kind'].replace('_', '-')} | {row['ranks']} | {row['where']} | "
        f"{1e6 * row['smallest_seconds']:,.1f} | {row['bandwidth'] / 1e9:,.2f}"
    )


def _bytes(number: float) -> str:
    unit, name = (
        (2**20, "MiB") if number >= 2**20 else (2**10, "KiB") if number >= 2**10 else (1, "B")
    )
    return f"{number / unit:.0f} {name}"
