"""What a test leaves in the variables of a launcher is undone; what it draws can be repeated."""

import re

pytest_plugins = ["pytester"]

TESTS = """
import os

import pytest


@pytest.fixture(scope="module")
def address():
    os.environ["MASTER_ADDR"] = "of the module"
    yield
    assert os.environ.pop("MASTER_ADDR") == "of the module"


def test_which_becomes_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    os.environ.update(RANK="2", WORLD_SIZE="4", CROSS_RANK="1", LOCAL_RANK="2")
    del os.environ["LOCAL_SIZE"]


def before():
    names = ("RANK", "WORLD_SIZE", "CROSS_RANK", "LOCAL_RANK", "LOCAL_SIZE")
    assert [os.environ.get(name) for name in names] == [None, None, None, "7", "8"]


def test_which_is_the_first_that_wants_an_address(address):
    before()
    os.environ["MASTER_ADDR"] = "of the test"


def test_which_wants_the_same_address(address):
    before()
    assert os.environ.pop("MASTER_ADDR") == "of the module"


def test_which_fails(address):
    assert os.environ["MASTER_ADDR"] == "of the module"
    os.environ["RANK"] = "3"
    raise ValueError


def test_after_it(address):
    before()
"""


def test_the_next_test_finds_what_was_there(pytester, monkeypatch, request):
    assert "launcher_variables" in request.fixturenames, "every test has it"
    for name in ("RANK", "WORLD_SIZE", "CROSS_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_SIZE", "8")
    pytester.makeconftest("from tests.conftest import launcher_variables")
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=4, failed=1)


def test_a_failure_says_how_to_draw_the_same_again(pytester, monkeypatch, request):
    assert "fresh_numbers" in request.fixturenames, "every test has it"
    monkeypatch.delenv("COAT_TEST_SEED", raising=False)
    pytester.makeconftest("from tests.conftest import fresh_numbers")
    pytester.makepyfile(
        "import torch\n\ndef test_it():\n    raise ValueError(torch.rand(2).tolist())"
    )

    def drawn():
        text = pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout.str()
        return re.search(r"ValueError: (.*)", text)[1], re.search(r"COAT_TEST_SEED=(\d+)", text)[1]

    first, other = drawn(), drawn()
    assert first != other
    monkeypatch.setenv("COAT_TEST_SEED", first[1])
    assert drawn() == first
