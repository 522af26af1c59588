"""docs/results.md: what stands in it is what the files say, and a table of earlier code says so."""

import json
import subprocess

import pytest

from benchmarks import results_page
from benchmarks.common import code_digest


def test_the_page_is_what_the_program_writes() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "python -m benchmarks.results_page"


@pytest.fixture
def results(tmp_path):
    """A copy of what the tables are made of, of the code that is here."""
    (tmp_path / "speed").mkdir()
    for table in results_page.TABLES.values():
        for name in table.results:
            if (have := results_page.read(name)) is not None:
                have["environment"]["code"] = code_digest()
                (tmp_path / "speed" / f"{name}.json").write_text(json.dumps(have))
    return tmp_path


def test_tables_of_earlier_code_say_so(results) -> None:
    table = results_page.TABLES["layers"]
    assert "earlier code" not in "\n".join(results_page.lines_of(table, results))
    file = results / "speed/experts.json"
    content = json.loads(file.read_text())
    content["environment"] |= {"code": "other", "commit": "0123456789"}
    file.write_text(json.dumps(content))
    assert results_page.lines_of(table, results)[-1] == "Of earlier code: `experts.json`, commit 0123456."
    file.unlink()
    assert results_page.lines_of(table, results) == ["Not measured yet: `experts.json`."]


def test_every_table_has_numbers(results) -> None:
    for name, table in results_page.TABLES.items():
        lines = results_page.lines_of(table, results)
        assert lines[0].startswith("Not measured yet") or (len(lines) > 2 and lines[1].startswith("|---")), name
        assert not any("{{" in line for line in lines)
    text = results_page.page(results)
    assert "{{" not in text and "earlier code: `" not in text


def test_what_is_measured(monkeypatch, capsys) -> None:
    """What is missing, outdated or can go on, in the tables' order, with the peers' folder; failures have names."""
    monkeypatch.setattr(results_page, "gpus", lambda: ["NVIDIA H200"] * 2)
    known = {
        name: {"environment": {"code": code_digest()}}
        for table in results_page.TABLES.values()
        for name in table.results
    }
    del known["experts"]
    known["optimizer"]["environment"]["code"] = "other"
    monkeypatch.setattr(results_page, "read", lambda name: known.get(name))
    found = list(dict.fromkeys(name for name, _ in results_page.to_measure([*results_page.TABLES])))
    assert found == ["experts", "optimizer", "whole", "whole-h100"]
    started = []

    def run(command, **_):
        started.append(command[1:])
        return subprocess.CompletedProcess(command, int("optimizer" in str(command)))

    monkeypatch.setattr(results_page.subprocess, "run", run)
    results_page.measure(results_page.parse(["--measure", "--peers", "a folder"]))
    names = ["experts", "optimizer", *["whole"] * 4]
    assert [words[1] for words in started] == [f"benchmarks.speed.{name}" for name in names]
    assert started[-1][-4:-1] == ["--peers", "a folder", "--seconds"]
    out = capsys.readouterr().out
    assert "optimizer: ended with 1" in out and "left out, is about H100, not NVIDIA H200: whole-h100" in out
    started.clear()
    results_page.measure(results_page.parse(["--measure", "--only", "whole", "layer"]))
    results_page.measure(results_page.parse(["--measure", "--seconds", "1", "--only", "optimizer"]))
    out = capsys.readouterr().out
    assert not started and "left out, needs --peers: whole" in out and "--seconds 1 are over: optimizer" in out
    monkeypatch.setattr(results_page, "gpus", lambda: ["NVIDIA H100"])
    known.clear()
    results_page.measure(results_page.parse(["--measure", "--peers", "x"]))
    assert len(started) == 8, "one GPU's, an H100's among them"
    assert "left out, needs 2 GPUs, 1 here: train-2-ranks" in capsys.readouterr().out


def test_commands_are_understood() -> None:
    """Those of the tables write the files that they are for."""
    import importlib
    import shlex

    for table in results_page.TABLES.values():
        for name, command in ((name, one) for name, commands in table.results.items() for one in commands):
            words = shlex.split(command.replace("PEERS", "--peers x"))
            at = words.index("-m", 2) if "-m" in words[2:] else 0
            parsed = importlib.import_module(words[at + 1]).parse(words[at + 2 :])
            stem = words[at + 1].rpartition(".")[2].replace("_", "-")
            given = getattr(parsed, "name", None) or stem
            assert name == given or name.startswith(f"{given}-"), command
