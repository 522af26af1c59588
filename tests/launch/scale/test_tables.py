"""Tables: what is measured, what failed, and docs/scaling.md compared with the program."""

import json
from pathlib import Path

import pytest

from launch import scaling
from launch.scale.bench import share
from launch.scale.tables import markdown, summary

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
MEASURED = ROOT / "benchmarks" / "results" / "scaling" / "two-h200"
NOTHING = {"rows": [], "links": ""}


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]


def measured():
    return json.loads((MEASURED / "measured.json").read_text())


def test_the_page_has_the_measured_tables(tmp_path, capsys):
    argv = ["--measured", str(MEASURED), "--predict", "8,64", "--link", "nic=400Gb/s,8us", "--output", str(tmp_path)]
    assert scaling.main(argv) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) > 20 and not [row for row in found if row not in PAGE]
    assert {p.name for p in tmp_path.iterdir()} == {"scaling.md", "scaling.json", "scaling.png"}


@pytest.mark.slow
def test_the_page_has_the_table_of_the_paper(capsys):
    """``-m slow``: minutes of planning."""
    assert scaling.main(["--paper"]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) == 19 and not [row for row in found if row not in PAGE]


def test_efficiency_is_against_the_fewest_ranks_and_a_bandwidth_is_of_the_largest_message():
    there = measured()
    found = summary(there, NOTHING)
    speeds = {(r["mode"], r["variant"], r["ranks"]): r["tokens_per_second_per_gpu"] for r in found["steps"]}
    for row in found["steps"]:
        own = row["mode"], row["variant"]
        assert row["efficiency"] == pytest.approx(speeds[*own, row["ranks"]] / speeds[*own, 1])
    last = [one for one in there["records"][0]["samples"] if one["kind"] == "all_reduce"][-1]
    assert last["size"] == 2**28 and share("all_reduce", 4) == 1.5 and share("all_gather", 4) == 0.75
    assert found["collectives"][0]["bandwidth"] == last["size"] / last["seconds"]


def test_strong_scaling_has_one_batch():
    there = measured()
    for record in there["records"]:  # as left by a call with one rank at most
        if record["ranks"] == 1:
            record["key"]["most"] = 1
    assert {row["ranks"] for row in summary(there, NOTHING)["steps"] if row["mode"] == "strong"} == {2}


def test_a_failed_measurement_is_reported_and_the_rest_is_there():
    there = measured()
    broken = there["records"][-1]
    broken.pop("steps")
    broken["failed"] = "rank 1 on a: out of memory"
    text = markdown(summary(there, NOTHING))
    assert "Failed: training bf16 on 2 ranks: rank 1 on a: out of memory" in text
    assert text.count("| coat | 2 |") == 2 and "| bf16 | 2 |" not in text


def test_what_was_asked_and_cannot_be_said_is_an_error_after_the_tables(tmp_path, capsys):
    assert scaling.main(["--measured", str(MEASURED), "--hold-out", "4", "--output", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "| coat | 2 |" in said.out and said.err.startswith("error: --hold-out: got 4") and list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path, capsys):
    whole = (MEASURED / "measured.json").read_text()
    (tmp_path / "measured.json").write_text(whole[: len(whole) // 2])
    assert scaling.main(["--measured", str(tmp_path)]) == 2
    assert "is no whole measured.json, accepted" in capsys.readouterr().err
    assert scaling.main(["--measured", str(tmp_path / "none")]) == 2
    assert "accepted: a folder in which scaling.py has written measured.json" in capsys.readouterr().err
