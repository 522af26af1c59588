import pytest
import torch

from tests.support import megatron_on_one_rank


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    """Megatron's groups over a single rank."""
    with megatron_on_one_rank():
        yield


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
