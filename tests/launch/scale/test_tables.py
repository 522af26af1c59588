"""Tables: what is measured, what failed, and docs/scaling.md compared with the program."""

import json
from pathlib import Path

import pytest

from launch import scaling
from launch.scale.bench import share
from launch.scale.tables import markdown, summary

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "results" / "scaling" / "two-h200"


def summarized(change=lambda records: None):
    there = json.loads((MEASURED / "measured.json").read_text())
    change(there["records"])
    return there, summary(there, {"rows": [], "links": ""})


def test_the_page_has_the_measured_tables(tmp_path, capsys):
    argv = ["--measured", str(MEASURED), "--predict", "8,64", "--output", str(tmp_path)]
    assert scaling.main(argv) == 0
    page = (ROOT / "docs" / "scaling.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    measured = [
        line for line in page[page.index("## Two H200s") :].splitlines() if line.startswith("|")
    ]
    assert len(measured) > 12 and not [row for row in measured if row not in rows]
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.md", "scaling.json"}


def test_efficiency_is_against_the_fewest_ranks_and_a_bandwidth_is_of_the_largest_message():
    there, found = summarized()
    speeds = {
        (r["mode"], r["variant"], r["ranks"]): r["tokens_per_second_per_gpu"]
        for r in found["steps"]
    }
    for row in found["steps"]:
        own = row["mode"], row["variant"]
        assert row["efficiency"] == pytest.approx(speeds[*own, row["ranks"]] / speeds[*own, 1])
    last = [one for one in there["records"][0]["samples"] if one["kind"] == "all_reduce"][-1]
    assert (
        last["size"] == 2**28 and share("all_reduce", 4) == 1.5 and share("all_gather", 4) == 0.75
    )
    assert found["collectives"][0]["bandwidth"] == last["size"] / last["seconds"]


def test_a_failed_measurement_is_reported_and_the_rest_is_there():
    def fail(records):
        records[-1] = {key: records[-1][key] for key in ("key", "ranks")} | {
            "failed": "rank 1: out of memory"
        }

    text = markdown(summarized(fail)[1])
    assert "Failed: training bf16 on 2 ranks: rank 1: out of memory" in text
    assert text.count("| coat | 2 |") == 2 and "| bf16 | 2 |" not in text
