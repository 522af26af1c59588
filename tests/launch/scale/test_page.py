"""Every table of docs/scaling.md is what the program says."""

import json
from pathlib import Path

import pytest

from launch import scaling
from launch.scale.analysis import analyse
from launch.scale.links import parse_links
from launch.scale.paper import _wire, network_of
from launch.scale.paper_tables import markdown as tables_on_paper
from launch.scale.report import markdown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def rows(text):
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]


def test_measured_tables():
    there = json.loads((ROOT / "benchmarks" / "results" / "scaling" / "two-h200" / "measured.json").read_text())
    text = markdown(analyse(there, predict=[4, 8, 64], links=parse_links(["nic=400Gb/s,8us"])))
    assert len(rows(text)) > 20 and not [row for row in rows(text) if row not in PAGE]
    assert all(line in PAGE for line in text.splitlines() if line.startswith("Steps, "))


def test_where_fp8_pays():
    args = type("Args", (), {"link": [], "gpus_per_node": None})
    answer = {"gpu": "h100", "rows": [], "zero3": [], "wire": _wire(network_of(args)), "published": []}
    found = [row for row in rows(tables_on_paper(answer)) if "MiB" in row]
    assert len(found) == 20 and not [row for row in found if row not in PAGE]


@pytest.mark.slow
def test_all_of_the_paper(capsys):
    """``-m slow``: minutes of planning."""
    assert scaling.main(["--paper"]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) > 70 and not [row for row in found if row not in PAGE]
