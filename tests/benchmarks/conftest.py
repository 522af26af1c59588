"""What tests of the benchmarks share."""

import re
from contextlib import contextmanager

import pytest


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
