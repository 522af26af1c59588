"""One rank, and two models, for each test of this folder."""

from __future__ import annotations

import pytest

from tests.gpu.cuda_graphs.models import pair
from tests.support import megatron_on_one_rank


@pytest.fixture(autouse=True)
def one_rank():
    with megatron_on_one_rank():
        yield


@pytest.fixture
def models():
    """Two models with equal weights, patched: without and with graphs."""
    return pair()
