"""One rank, and two models, for each test of this folder."""

from __future__ import annotations

import pytest

from tests.gpu.cuda_graphs.models import pair


@pytest.fixture(autouse=True)
def always_one_rank(one_rank):
    pass


@pytest.fixture
def models():
    """Two models with equal weights, patched: without and with graphs."""
    return pair()
