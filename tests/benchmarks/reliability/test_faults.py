"""A part of the fault matrix, in the same way as all of it is run."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.common import ROOT, python_path
from benchmarks.reliability import faults
from benchmarks.reliability.bench import short, some

needs = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the library that kills at a call needs Linux and a C compiler",
)


@needs
@pytest.mark.parametrize("stage, groups", [(2, ["kills", "damage", "full-disk"]), (3, ["kills", "stopped"])])
def test_some_of_each_kind(stage, groups, tmp_path):
    """Every case of coat_dist passes; the exit status says so, too."""
    line = [sys.executable, "-m", "benchmarks.reliability.faults", "--quick", "--programs", "coat"]
    line += ["--stages", str(stage), "--groups", *groups, "--output", str(tmp_path)]
    run = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path(ROOT)}, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "reliability" / "faults-quick.json").read_text())
    seen = result["cases"]["coat_dist"]
    cases = [(kind.partition(", ")[2], *case.split(" | ", 2)) for kind, found in seen.items() for case in found]
    assert {how for _, _, how, _ in cases} == {"passed"}
    assert len(cases) == sum(faults.QUICK[group] for group in groups)
    # What a pass means was seen, and not only that nothing failed.
    assert all("resumes" in what for kind, _, _, what in cases if kind in ("kill", "full disk"))
    assert all("names rank" in what for kind, _, _, what in cases if kind == "hung rank")


def test_the_table_counts_what_passed():
    case = {"group": "kill", "stage": 1, "name": "", "what": ""}
    rows = faults.summary({"coat": [{**case, "passed": True}] * 3, "deepspeed": [{**case, "passed": False}]})
    assert faults.table(rows).splitlines()[-1] == "| kill | 1 | 3 of 3 | 0 of 1 |"
    assert "| kill | 1 | 3 of 3 |" in faults.table(faults.summary({"coat": [{**case, "passed": True}] * 3}))


def test_messages_lose_the_folders_of_this_machine():
    assert short("no file /a/b.c/d-1/latest here\n  /x/y/z.pt") == "no file latest here z.pt"
    assert some(list(range(10)), 4) == [0, 3, 6, 9] and some([1, 2], 4) == [1, 2]
