"""Commands in the documentation can be typed, and benchmarks/README.md leads to every
figure.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.common import RESULTS, ROOT, dumps

INDEX = ROOT / "benchmarks" / "README.md"
PAGES = [ROOT / "README.md", INDEX, *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"-m (benchmarks\.[\w.]+)(.*)", re.DOTALL)


def commands(page: Path) -> list[tuple[str, str]]:
    """Module and arguments of every ``-m benchmarks.X ...`` in inline code and in code blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )
    code = [
        *inline,
        *(line for block in blocks for line in block.replace("\\\n", " ").splitlines()),
    ]
    return [(m[1], m[2]) for m in map(COMMAND.search, code) if m]


FOUND = {(module, arguments): page for page in PAGES for module, arguments in commands(page)}


def test_commands_are_found() -> None:
    """In a code block with a comment behind it, broken over lines, and behind another program's
    name.
    """
    found = {(module, *shlex.split(rest, comments=True)[:2]) for module, rest in FOUND}
    assert ("benchmarks.accuracy.trajectories",) in found
    assert ("benchmarks.speed.engine_step",) in found
    assert ("benchmarks.convergence.pairs", "--budget", "540") in found
    assert len(FOUND) >= 20


@pytest.mark.parametrize("module, arguments", FOUND)
def test_a_documented_command_is_understood(module, arguments) -> None:
    importlib.import_module(module).parse(shlex.split(arguments, comments=True))


@pytest.mark.parametrize("folder", ["benchmarks/results", "docs/figures", "benchmarks"])
def test_the_index_names_every(folder) -> None:
    index = INDEX.read_text(encoding="utf-8")
    files = {
        "benchmarks/results": [p for p in RESULTS.rglob("*.json") if not p.stem.endswith("-tiny")],
        "docs/figures": list((ROOT / folder).glob("*.png")),
        "benchmarks": [p for p in (ROOT / folder).glob("*/*.py") if p.stem != "__init__"],
    }[folder]
    for file in files:
        room, name = file.parent.name, file.name
        ways = {".json": [f"`{room}/{name}`"], ".png": [f"`{name}`"]}
        named = ways.get(
            file.suffix, [f"`{name}`", f"`{room}/{name}`", f"-m benchmarks.{room}.{file.stem}"]
        )
        assert any(way in index for way in named), file.relative_to(ROOT)


def test_results_are_as_the_writer_leaves_them_and_short() -> None:
    lines = 0
    for file in RESULTS.rglob("*.json"):
        text = file.read_text(encoding="utf-8")
        assert text == dumps(json.loads(text)) + "\n", file
        assert {"command", "commit", "versions", "gpus"} <= json.loads(text)["environment"].keys()
        lines += text.count("\n")
    assert lines < 3000
