import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    """Megatron's groups over a single rank."""
    from megatron.core import parallel_state

    from megatron_patches import initialize_model_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
