"""What identifies a run in its result."""

from __future__ import annotations

import json
import math
import sys

import pytest

from benchmarks import common


@pytest.mark.parametrize("option", ["--peers", "--data", "--extend", "--plot"])
def test_the_command_holds_no_paths(monkeypatch, option) -> None:
    for given in ([option, "/home/me/a"], [f"{option}=/home/me/a=b"]):
        arguments = [
            "--runs",
            "a b:0",
            *given,
            "--steps=20",
            "--output=/home/me",
            "--tiny",
            "--output",
            "/home/me",
        ]
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
        assert common.command().endswith(f" --runs 'a b:0' {option} PATH --steps=20 --tiny")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        "a\n",
        1e-30,
        (1, 2),
        {3: {4: "é"}},
        [[0.1] * 100, [1 / 3] * 100],
        {"a": [{}, {"b": [[]] * 90}]},
        {"curve": list(range(1000)), "records": [{"name": "x" * 90, "shape": [1, 2]}] * 4},
    ],
)
def test_the_writer_keeps_everything(value) -> None:
    assert json.loads(common.dumps(value)) == json.loads(json.dumps(value))


def test_what_is_measured_is_written_without_paths_and_names() -> None:
    parser = common.argument_parser("Title.\n\nMore.")
    parser.add_argument("--name")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", nargs="+")
    arguments = parser.parse_args(
        ["--output", "somewhere", "--name", "a", "--steps", "3", "--runs", "b"]
    )
    assert common.options(arguments, "runs") == {"steps": 3}
    assert parser.description == "Title." and arguments.output == "somewhere"


def test_a_result_has_the_name_of_its_room_and_program(tmp_path) -> None:
    path = common.write_result("speed/layer", {"numbers": [1, 2]}, tmp_path)
    assert path == tmp_path / "speed" / "layer.json"
    found = json.loads(path.read_text())
    assert list(found) == ["environment", "numbers"] and found["numbers"] == [1, 2]
    assert common.result_path("speed/layer") == common.ROOT / "benchmarks/results/speed/layer.json"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_written(tmp_path, value) -> None:
    path = tmp_path / "a.json"
    common.write_json(path, {"rows": [{"errors": [1.0]}]})
    before = path.read_text()
    with pytest.raises(
        ValueError,
        match=rf"a.json: not written; rows\[0\].errors\[1\]: got {value}, accepted: finite",
    ):
        common.write_json(path, {"rows": [{"errors": (1.0, value)}]})
    assert path.read_text() == before
    common.write_json(path, {"rows": [{"errors": (1.0, value)}]}, nan=True)
    assert path.read_text() != before
