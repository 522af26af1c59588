"""Process groups, the mpu adapter and random states, on one rank."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_patches import MPUAdapter, rng_state, set_rng_state
from tests.support import equal


def test_mpu_adapter_counts_pipeline_stages_as_model_parallel(monkeypatch):
    sizes = {"pipeline_model_parallel_world_size": 2, "tensor_model_parallel_world_size": 4}
    ranks = {
        "pipeline_model_parallel_rank": 1,
        "tensor_model_parallel_rank": 3,
        "model_parallel_group": "both",
    }
    for name, value in {**sizes, **ranks}.items():
        monkeypatch.setattr(parallel_state, f"get_{name}", lambda value=value: value)
    mpu = MPUAdapter()
    assert mpu.get_data_parallel_rank() == 0 and mpu.get_data_parallel_group_ranks() == [0]
    assert (mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()) == (8, 7)
    assert mpu.get_model_parallel_group() == "both"


def test_set_rng_state_resumes(device):
    """Dropout in and outside tensor-parallel regions, and the CPU's generator, continue as if
    never interrupted.
    """

    def draw():
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(4, device=device)
        return torch.cat([inside.cpu(), torch.rand(4, device=device).cpu(), torch.rand(4)])

    draw()
    state = rng_state()
    first = [draw() for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    set_rng_state(state)
    assert equal([draw() for _ in first], first)
    set_rng_state(state)  # using a state must not have changed it
    assert torch.equal(draw(), first[0])
