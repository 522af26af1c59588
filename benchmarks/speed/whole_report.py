"""Tables and the picture of ``whole.py``'s result: equal and largest micro-batches, tokens/s over
micro-batch.

    python -m benchmarks.speed.whole_report [--plot docs/figures/speed-whole.png] [--name whole]

Prints Markdown. Each group of tables ends with the commits and dates of its cases. A case that
failed or that time has cut is in no table, but is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import argument_parser, one_line
from benchmarks.common import number, read_json, result_path, write_figure

GIB = 2**30
PLUS = "+ memory was not out at the largest micro-batch that was tried."
"""What a plus in :func:`largest` means."""


def finished(case: dict[str, Any]) -> bool:
    """It has neither failed nor been cut."""
    return "error" not in case and not case.get("cut")


def unfinished(cases: Sequence[dict[str, Any]]) -> list[str]:
    """A line that names the other cases; none if there are none."""
    names = [
        f"{case['variant']} ({title(case)}; {'failed' if 'error' in case else 'cut by time'})"
        for case in cases
        if not finished(case)
    ]
    return [f"Not finished: {', '.join(names)}."] if names else []


def group_of(case: dict[str, Any]) -> tuple:
    """What a case has in common with those that it is compared with: all but its variant."""
    gpu = case["measured"]["gpus"][:1]
    return (
        case["model"],
        *case["override"],
        *gpu,
        case["ranks"],
        case["stage"],
        case["gpu_memory"],
    )


def groups(cases: Sequence[dict[str, Any]]) -> dict[tuple, list[dict[str, Any]]]:
    """Finished cases that differ in nothing but their variant, in the order of the file."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for case in cases:
        if finished(case):
            found.setdefault(group_of(case), []).append(case)
    return found


def title(case: dict[str, Any]) -> str:
    """What the cases of a group have in common."""
    memory = "" if case["gpu_memory"] is None else f", {case['gpu_memory']:g} GiB of it"
    gpus = case["measured"]["gpus"]
    name = gpus[0].removeprefix("NVIDIA ") if gpus else "CPU"
    model = " ".join([case["model"], *case["override"]])
    return f"{model}, {case['ranks']} x {name}{memory}, ZeRO-{case['stage']}"


def measured(cases: Sequence[dict[str, Any]]) -> str:
    """The commits and dates of cases, each with its variants where there are several."""
    found: dict[str, list[str]] = {}
    for case in cases:
        of_it = f"commit {str(case['measured']['commit'])[:7]}, {case['measured'].get('date')}"
        found.setdefault(of_it, []).append(case["variant"])
    rows = [
        of_it + (f" ({'; '.join(names)})" if len(found) > 1 else "")
        for of_it, names in found.items()
    ]
    return f"Measured: {'; '.join(rows)}."


def best(case: dict[str, Any]) -> dict[str, Any] | None:
    """The step with the largest micro-batch."""
    return max(case["steps"], key=lambda step: step["micro_batch"], default=None)


def fastest(case: dict[str, Any]) -> dict[str, Any]:
    """The step with most tokens a second."""
    return max(case["steps"], key=lambda step: step["tokens_per_second_per_gpu"])


Pair = tuple[dict[str, Any], dict[str, Any]]
"""A case, and one of its steps."""


def _base(pairs: Sequence[Pair]) -> Pair | None:
    """BF16's."""
    return next((pair for pair in pairs if pair[0]["variant"] == "BF16"), None)


def _row(case: dict[str, Any], step: dict[str, Any], base: Pair | None, plus: str = "") -> str:
    name, held = case["variant"], step["held_bytes"]
    speed = step["tokens_per_second_per_gpu"]
    ratio = "" if base is None else f"{speed / base[1]['tokens_per_second_per_gpu']:.2f}"
    return (
        f"| {name} | {step['micro_batch']}{plus} | {held['optimizer moments'] / GIB:.1f} | "
        f"{held['activations'] / GIB:.1f} | "
        f"{step.get('peak_bytes', 0) / GIB:.1f} | {number(speed)} | {ratio} | "
        f"{step.get('allocator_retries', '')} |"
    )


HEAD = [
    "| | micro-batch | moments, GiB | saved for backward, GiB | peak, GiB | tokens/s/GPU | to BF16 "
    "| retries |",
    "|---|---|---|---|---|---|---|---|",
]


def equal(cases: list[dict[str, Any]]) -> list[str]:
    """A table at the largest micro-batch that all variants which fit have; empty where there is
    none, or no two fit.
    """
    shared = [{s["micro_batch"] for s in case["steps"]} for case in cases if case["steps"]]
    common = set.intersection(*shared) if len(shared) > 1 else set()
    if not common:
        return []
    pairs = [
        (case, step)
        for case in cases
        for step in case["steps"]
        if step["micro_batch"] == max(common)
    ]
    return HEAD + [_row(*pair, _base(pairs)) for pair in pairs]


def largest(cases: list[dict[str, Any]]) -> list[str]:
    """A table at each variant's largest micro-batch, with a plus where memory was not out at the
    largest that was tried; and a line that names those that do not fit.
    """
    pairs = [(case, step) for case in cases if (step := best(case)) is not None]
    rows = []
    for case, step in pairs:
        plus, most = "+" if case["out_of_memory_at"] is None else "", fastest(case)
        row = _row(case, step, _base(pairs), plus)
        rows.append(f"{row} {number(most['tokens_per_second_per_gpu'])} ({most['micro_batch']}) |")
    head = [HEAD[0] + " fastest (micro-batch) |", HEAD[1] + "---|"]
    out: dict[int, list[str]] = {}
    for case in cases:
        if not case["steps"]:
            out.setdefault(case["out_of_memory_at"], []).append(case["variant"])
    named = " ".join(
        f"Out of memory with micro-batch {n}: {'; '.join(out[n])}." for n in sorted(out)
    )
    return [
        *(head if rows else []),
        *rows,
        *([""] if rows and named else []),
        *([named] if named else []),
    ]


def fits(cases: Sequence[dict[str, Any]]) -> bool:
    """Whether any case trains."""
    return any(case["steps"] for case in cases)


def plot(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens/s/GPU over micro-batch, a panel for each group in which something fits; a cross
    where memory was out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    found = [of_group for of_group in groups(cases).values() if fits(of_group)]
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    names = dict.fromkeys(case["variant"] for of_group in found for case in of_group)
    colors = {name: f"C{index % 10}" for index, name in enumerate(names)}
    for axis, of_group in zip(axes.flat, found, strict=False):
        for case in of_group:
            if not case["steps"]:
                continue
            x = [s["micro_batch"] for s in case["steps"]]
            y = [s["tokens_per_second_per_gpu"] for s in case["steps"]]
            color = colors[case["variant"]]
            axis.plot(x, y, marker="o", markersize=3, color=color, label=case["variant"])
            if case["out_of_memory_at"] is not None:
                axis.plot(case["out_of_memory_at"], y[-1], marker="x", color=color)
        most = max(step["tokens_per_second_per_gpu"] for case in of_group for step in case["steps"])
        axis.set(
            title=title(of_group[0]),
            xlabel="micro-batch",
            ylabel="tokens/s/GPU",
            ylim=(0, 1.1 * most),
        )
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    write_figure(path, figure, dpi=110)
    pyplot.close(figure)


def report(cases: Sequence[dict[str, Any]]) -> list[str]:
    """All tables."""
    lines = []
    for of_group in groups(cases).values():
        lines += [f"### {title(of_group[0])}", ""]
        if table := equal(of_group):
            lines += ["Equal micro-batches:", "", *table, ""]
        lines += [*(["Each one's largest:", ""] if fits(of_group) else []), *largest(of_group), ""]
        lines += [measured(of_group), ""]
    return with_notes(lines[:-1], cases)


def with_notes(lines: list[str], cases: Sequence[dict[str, Any]]) -> list[str]:
    """Tables, what their marks mean, and which of the cases are not in them."""
    text = "\n".join(lines)
    notes = [PLUS] if "+ |" in text else []
    return lines + [line for note in (*notes, *unfinished(cases)) for line in ("", note)]


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    return argument_parser(__doc__, plot=None, name="whole").parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    path = result_path(f"speed/{arguments.name}", arguments.output)
    with one_line():
        cases = read_json(path, "cases")["cases"]
    print("\n".join(report(cases)))
    if arguments.plot is not None:
        plot(cases, Path(arguments.plot))


if __name__ == "__main__":
    main()
