"""Tests of this folder need a GPU. Those of more need, or of instructions for FP8, say so."""

from pathlib import Path

import pytest
import torch

from tests.support import megatron_on_one_rank


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def one_rank():
    """Megatron's groups over a single rank."""
    with megatron_on_one_rank():
        yield
