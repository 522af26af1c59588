"""The planner's check builds and trains what it names, small."""

import json

from benchmarks.speed import planner_check


def test_a_case_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ["--tiny", "--only", "7b-zero2-coat-mlp-recompute-mb4", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["planner_check", *options])
    planner_check.main()
    (one,) = json.loads((tmp_path / "speed/planner-check.json").read_text())["results"].values()
    assert "error" not in one and one["seconds"]["step"] > 0, one
    held = {name for name, size in one["bytes"].items() if size > 0}
    assert {"held: optimizer moments", "held: activations", "held: gradients"} <= held
    assert "failed" not in capsys.readouterr().out
