"""Writes docs/results.md, README's parts and their figure; ``--measure`` first measures what is missing or outdated.

    python -m benchmarks.results_page
    python -m benchmarks.results_page --measure [--seconds 540] [--peers DIR]        # or: make results PEERS=DIR

``results_page.md`` is the page's text; ``{{name}}`` in it is a table of ``results_tables.py``. A result whose code is
not what is here (``measured_code.py``) is said to be of earlier code, is left out of README
(``results_headline.py``, ``results_readme.py``), and is what ``--measure`` measures again (``results_measure.py``), a
command after the other until ``--seconds`` are over: the same command goes on.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import positive_float
from benchmarks.common import RESULTS, ROOT, write
from benchmarks.results_headline import headline
from benchmarks.results_measure import cases_left, measure
from benchmarks.results_readme import FIGURE, FIGURES, README, in_readme, loss_gaps, readme_part
from benchmarks.results_tables import DAMAGED, TABLES, lines_of, read
from benchmarks.speed import whole_report

__all__ = ["PAGE", "draw", "main", "page", "readme"]

TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs/results.md"
SECONDS = 540


def page(results: Path = RESULTS, figures: Path = FIGURES) -> str:
    """The whole page."""

    def lines(match: re.Match[str]) -> str:
        if match[1] == "whole_figure":
            shown = "Tokens a second over the micro-batch, a cross where memory was out"
            return f"![{shown}](figures/{FIGURE})\n\n" if (figures / FIGURE).is_file() else ""
        if match[1] == "loss_gaps":
            return loss_gaps(results) + match[2]
        table = TABLES[match[1]]
        left = [line for one in cases_left(table, results) for line in ("", one)]
        return "\n".join([*lines_of(table, results), *left]) + match[2]

    return re.sub(r"\{\{(\w+)\}\}(\n*)", lines, TEMPLATE.read_text(encoding="utf-8"))


def draw(results: Path = RESULTS, figures: Path = FIGURES) -> Path | None:
    """Draw the figure of whole models."""
    return whole_report.draw((read("whole", results) or {"cases": []})["cases"], figures / FIGURE)


def readme(text: str) -> str:
    """README with its two parts as they are now."""
    return in_readme(in_readme(text, readme_part()), headline(), "headline")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of this program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # all has its place: no --output
    parser.add_argument("--measure", action="store_true", help="what is missing or of other code, before")
    parser.add_argument("--only", nargs="+", choices=[*TABLES], help="tables to measure (default: all)")
    parser.add_argument("--again", action="store_true", help="measure also what is of this code")
    parser.add_argument("--seconds", type=positive_float, help=f"start no command later than this (default: {SECONDS})")
    parser.add_argument("--peers", help="folder with Transformer Engine, or with an archive of it")
    arguments = parser.parse_args(given)
    for name in ("only", "again", "seconds", "peers"):
        if not arguments.measure and getattr(arguments, name) != parser.get_default(name):
            parser.error(f"--{name}: got it without --measure, accepted: with it")
    if arguments.seconds is None:
        arguments.seconds = SECONDS
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    try:
        if arguments.measure:
            measure(arguments)
        page(), readme(README.read_text(encoding="utf-8"))  # before the figure is removed or drawn
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except DAMAGED as problem:
        where = f"{RESULTS}: a result lacks something ({type(problem).__name__}: {problem})"
        print(f"error: {where}, accepted: results as their commands write them", file=sys.stderr)
        sys.exit(2)
    try:
        figure = draw()
        write(PAGE, page())
        write(README, readme(README.read_text(encoding="utf-8")))
    except OSError as problem:
        print(f"error: {problem.filename}: {problem.strerror}", file=sys.stderr)
        sys.exit(2)
    for path in (PAGE, README, figure):
        if path is not None:
            print("wrote", path.relative_to(ROOT))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # while it writes, see measure() for the rest
        sys.exit(128 + signal.SIGINT)
