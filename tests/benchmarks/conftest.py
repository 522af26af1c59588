"""What tests of the tables share."""

import re
from contextlib import contextmanager

import pytest

from benchmarks import results_tables
from benchmarks.common import RESULTS
from tests.benchmarks.made_up import KERNELS, STEP, put
from tests.benchmarks.speed.test_whole import case


@pytest.fixture
def results(tmp_path):
    """What the tables are made of, as if of the code that is here: a copy, and what is not there yet made up."""
    (tmp_path / "speed").mkdir()
    for table in results_tables.TABLES.values():
        for name in table.results:
            if (have := results_tables.read(name)) is not None:
                put(tmp_path, name, have)
    for room, name in (("convergence", "branches"), ("accuracy", "trajectories")):
        (tmp_path / room).mkdir()
        (tmp_path / room / f"{name}.json").write_text((RESULTS / room / f"{name}.json").read_text())
    put(tmp_path, "step", STEP)
    other = STEP | {"settings": {"variant": "TE fp8 delayed"}, "kernels": {"other": KERNELS["products"]}}
    put(tmp_path, "step-te-fp8", other)
    put(tmp_path, "whole", {"cases": [case("BF16", {1: 1000.0}, 2), case("both", {1: 1200.0, 2: 2000.0}, 3)]})
    return tmp_path


@pytest.fixture
def refused(capsys):
    """A program ends in this block, with one line that has these words."""

    @contextmanager
    def block(words):
        with pytest.raises(SystemExit) as ending:
            yield
        said = capsys.readouterr().err.strip().splitlines()
        usage = "" if len(said) < 2 else said[0]
        assert said and words in said[-1] and re.search(r"(^|: )error: ", said[-1]), said
        assert usage.startswith("usage: ") or len(said) == 1
        assert ending.value.code == 2

    return block
