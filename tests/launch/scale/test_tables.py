"""Tables of measured steps, and docs/scaling.md compared with the program."""

import json
from pathlib import Path

from launch.scale.tables import markdown, steps

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "results" / "scaling" / "two-h200"


def measured():
    return json.loads((MEASURED / "measured.json").read_text())


def test_markdown_is_what_the_page_has():
    page = (ROOT / "docs" / "scaling.md").read_text()
    shown = page[page.index("## Two H200s") :].splitlines()
    rows, shown = markdown(measured()).splitlines(), [line for line in shown if "±" in line]
    assert shown and all(line in rows for line in shown)


def test_steps_have_efficiencies_against_the_fewest_ranks():
    there = measured()
    for mode in ("weak", "strong"):
        rows = steps(there, mode)
        speeds = {(row["variant"], row["ranks"]): row["per_gpu"] for row in rows}
        assert speeds.keys() == {("coat", 1), ("coat", 2), ("bf16", 1), ("bf16", 2)}
        for row in rows:
            assert row["efficiency"] == row["per_gpu"] / speeds[row["variant"], 1]
            samples = 2 * row["accumulation"] * row["ranks"]
            assert row["tokens_per_second"] == samples * 4096 / row["seconds"]
    assert [row["accumulation"] for row in steps(there, "strong")] == [2, 1, 2, 1]
