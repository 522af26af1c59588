"""Tables of measured scaling."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .bench import share

__all__ = ["markdown", "spread_of", "summary"]


def _table(head: str, rows: Iterable[str]) -> list[str]:
    """Lines of a Markdown table; cells are separated by " | "."""
    return [
        "",
        f"| {head} |",
        "|" + "---|" * (1 + head.count(" | ")),
        *(f"| {row} |" for row in rows),
    ]


def _between(low_middle_high: Sequence[float], scale: float = 1.0, digits: int = 0) -> str:
    """A prediction for a reader: the middle, then low to high."""
    low, middle, high = (f"{scale * one:,.{digits}f}" for one in low_middle_high)
    return f"{middle} ({low}–{high})"


def spread_of(seconds: Sequence[float]) -> float:
    """Relative standard deviation, from the middle half of the steps: a disturbed step does not
    count.
    """
    if len(seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 1.349 / statistics.median(seconds)


def summary(there: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of all tables from ``measured.json`` and predictions: seconds, bytes a
    second.
    """
    records = there["records"]
    return {
        "identity": there["identity"],
        "steps": _steps([one for one in records if "steps" in one], there["identity"]),
        "collectives": [row for one in records if "samples" in one for row in _collectives(one)],
        "predictions": predicted["rows"],
        "links": predicted["links"],
        "failed": [
            one["key"] | {"ranks": one["ranks"], "why": one["failed"]}
            for one in records
            if "failed" in one
        ],
    }


def _steps(
    training: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of weak and strong scaling, each with its efficiency against the fewest ranks."""
    rows = [
        row
        for one in training
        for measured in one["steps"]
        for row in _of_modes(one, measured, identity)
    ]
    rows.sort(key=lambda row: (row["mode"] != "weak", row["variant"] != "coat", row["ranks"]))
    for row in rows:
        first = next(r for r in rows if (r["variant"], r["mode"]) == (row["variant"], row["mode"]))
        row["efficiency"] = row["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
    return rows


def _of_modes(
    record: Mapping[str, Any], measured: Mapping[str, Any], identity: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A measurement as a row of weak scaling, of strong scaling or of both."""
    ranks, key, accumulation = record["ranks"], record["key"], measured["accumulation"]
    samples = identity["micro_batch"] * accumulation * (ranks // identity["tensor_parallel"])
    seconds = statistics.median(measured["seconds"])
    speed = samples * identity["model"]["seq_length"] / seconds
    weak = accumulation == identity["accumulation"]
    strong = key["strong"] and accumulation * ranks == identity["accumulation"] * key["most"]
    for mode in ["weak"] * weak + ["strong"] * strong:
        yield {
            "variant": key["variant"],
            "mode": mode,
            "ranks": ranks,
            "accumulation": accumulation,
            "seconds": seconds,
            "spread": spread_of(measured["seconds"]),
            "tokens_per_second": speed,
            "tokens_per_second_per_gpu": speed / ranks,
            "peak_memory_bytes": record["peak_memory_bytes"],
        }


def _collectives(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each kind: the smallest and the largest message."""
    a_node, nodes = record["a_node"], -(-record["ranks"] // record["a_node"])
    for kind in dict.fromkeys(one["kind"] for one in record["samples"]):
        own = sorted(
            (one for one in record["samples"] if one["kind"] == kind), key=lambda one: one["size"]
        )
        first, last = own[0], own[-1]
        yield {
            "kind": kind,
            "ranks": last["ranks"],
            "where": "in a node"
            if nodes == 1
            else "between nodes"
            if a_node == 1
            else f"{nodes} nodes",
            "smallest_bytes": first["size"],
            "smallest_seconds": first["seconds"],
            "largest_bytes": last["size"],
            "bandwidth": last["size"] * share(kind, last["ranks"]) / last["seconds"],
        }


def markdown(found: Mapping[str, Any]) -> str:
    """All tables, as one page."""
    identity = found["identity"]
    nodes = f"{identity['nodes']} node{'s' if identity['nodes'] > 1 else ''}"
    versions = f"torch {identity['versions']['torch']}"
    lines = [
        "# Scaling",
        "",
        f"Measured on {identity['world']} x {identity['device']} on {nodes}; {versions}.",
    ]
    if found["steps"]:
        model = identity["model"]
        lines += [
            "",
            f"Model {identity['model_name']}: micro-batch {identity['micro_batch']} of "
            f"{model['seq_length']} tokens, "
            f"vocabulary {model['vocab_size']}, tensor-parallel {identity['tensor_parallel']}. "
            "Times are medians of "
            "steps; efficiency is against the fewest ranks.",
        ]
    for mode in ("weak", "strong"):
        if rows := [_step_cells(row) for row in found["steps"] if row["mode"] == mode]:
            head = (
                "variant | ranks | micro-batches | step, ms | tokens/s | tokens/s/GPU | "
                "efficiency | peak, GiB"
            )
            lines += ["", f"## {mode.capitalize()} scaling", *_table(head, rows)]
    if found["collectives"]:
        ends = (_bytes(found["collectives"][0][f"{end}_bytes"]) for end in ("smallest", "largest"))
        lines += [
            "",
            "## Collectives",
            "",
            "Messages of {} for latency and {} for bandwidth.".format(*ends),
        ]
        head = "collective | ranks | link | latency, µs | bandwidth, GB/s"
        lines += _table(head, map(_collective_cells, found["collectives"]))
    if found["predictions"]:
        lines += ["", "## Predicted: weak scaling", "", f"Links: {found['links']}."]
        head = (
            "variant | from ranks | to ranks | step, ms | tokens/s/GPU | efficiency, % | "
            "measured, ms"
        )
        lines += _table(head, map(_prediction_cells, found["predictions"]))
    for one in found["failed"]:
        lines += [
            "",
            f"Failed: {one['what']} {one.get('variant', '')} on {one['ranks']} ranks: {one['why']}",
        ]
    return "\n".join(lines) + "\n"


def _step_cells(row: Mapping[str, Any]) -> str:
    peak = "-" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**30:.1f}"
    return (
        f"{row['variant']} | {row['ranks']} | {row['accumulation']} | {1e3 * row['seconds']:,.1f} "
        "± "
        f"{100 * row['spread']:.1f} % | {row['tokens_per_second']:,.0f} | "
        f"{row['tokens_per_second_per_gpu']:,.0f} | "
        f"{100 * row['efficiency']:.1f} % | {peak}"
    )


def _collective_cells(row: Mapping[str, Any]) -> str:
    return (
        f"{row['kind'].replace('_', '-')} | {row['ranks']} | {row['where']} | "
        f"{1e6 * row['smallest_seconds']:,.1f} | "
        f"{row['bandwidth'] / 1e9:,.2f}"
    )


def _prediction_cells(row: Mapping[str, Any]) -> str:
    measured = "-" if row["measured"] is None else f"{1e3 * row['measured']:,.1f}"
    return (
        f"{row['variant']} | {row['from']} | {row['ranks']} | {_between(row['seconds'], 1e3, 1)} | "
        f"{row['tokens_per_second_per_gpu'][1]:,.0f} | {_between(row['efficiency'], 100)} | "
        f"{measured}"
    )


def _bytes(number: float) -> str:
    unit, name = (
        (2**20, "MiB") if number >= 2**20 else (2**10, "KiB") if number >= 2**10 else (1, "B")
    )
    return f"{number / unit:.0f} {name}"
