"""Tables: what is measured, what failed, and docs/scaling.md compared with the program."""

import json
from pathlib import Path

from launch import scaling
from launch.scale.collective_timing import share
from launch.scale.tables import collectives, markdown, steps

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "results" / "scaling" / "two-h200"


def measured():
    return json.loads((MEASURED / "measured.json").read_text())


def test_the_page_has_the_measured_tables(tmp_path, capsys):
    argv = ["--measured", str(MEASURED), "--output", str(tmp_path)]
    assert scaling.main(argv) == 0
    page = (ROOT / "docs" / "scaling.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    shown = [
        line for line in page[page.index("## Two H200s") :].splitlines() if line.startswith("|")
    ]
    assert len(shown) > 5 and not [row for row in shown if row not in rows]
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.md"}


def test_efficiency_is_against_the_fewest_ranks_and_a_bandwidth_is_of_the_largest_message():
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
    last = [one for one in there["records"][0]["samples"] if one["kind"] == "all_reduce"][-1]
    assert (
        last["size"] == 2**28 and share("all_reduce", 4) == 1.5 and share("all_gather", 4) == 0.75
    )
    first, *_ = collectives(there)
    assert first["bandwidth"] == last["size"] / last["seconds"]


def test_a_failed_measurement_is_reported_and_the_rest_is_there():
    there = measured()
    kept = {key: there["records"][-1][key] for key in ("key", "ranks", "a_node")}
    there["records"][-1] = {**kept, "failed": "rank 1: out of memory"}
    text = markdown(there)
    assert "Failed: training bf16 on 2 ranks: rank 1: out of memory" in text
    assert text.count("| coat | 2 |") == 2 and "| bf16 | 2 |" not in text
