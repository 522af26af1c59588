"""Kernels run on the GPU where there is one that they run on, and on the CPU in Triton's
interpreter elsewhere.

No test leaves the variables of a launcher to the next one. Each draws numbers anew; a failure says
how to repeat them.
"""

import os
import secrets

import pytest
import torch

from tests.support import devices

# Before anything imports Triton, which reads the environment while it defines kernels.
devices.prepare()


SEED = "COAT_TEST_SEED"
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
NODES = ("GROUP_RANK", "CROSS_RANK", "CROSS_SIZE")


@pytest.fixture(autouse=True)
def launcher_variables():
    """After each test they are what they were before it.

    `deepspeed.initialize` without a launcher makes this process the only rank, and what later tests
    start would be that rank, too. What fixtures of a module or session set stays: they are made
    before those of a function.
    """
    before = {name: os.environ.get(name) for name in RANKS + NODES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def no_launcher(monkeypatch):
    """As in a process that no launcher has started."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def fresh_numbers(request):
    """The numbers that torch draws in this process are of a new seed for every test, or of
    ``COAT_TEST_SEED``.
    """
    seed = int(os.environ.get(SEED) or secrets.randbits(32))
    torch.manual_seed(seed)
    request.node.add_report_section(
        "setup", "seed", f"{SEED}={seed} repeats what this test drew in its own process"
    )


def pytest_collection_modifyitems(items):
    """Mark as ``long`` what starts processes; `make test-unit` leaves that out, and what interprets
    kernels (``coat_dist/ops/test_kernels.py``).
    """
    for item in items:
        names = "run_ranks", "start_ranks", "Program", "subprocess"
        if any(hasattr(item.module, name) for name in names):
            item.add_marker(pytest.mark.long)
