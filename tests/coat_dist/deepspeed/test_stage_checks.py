"""Noise that the copies of a tied embedding draw on two stages. (Of steps:
test_pipeline_engine.py of Megatron.)
"""

import types

import torch

from coat_dist import CoatAdamW
from coat_dist.deepspeed.parallel.pipeline import name_tied


def test_a_tied_embedding_draws_the_same_noise_behind_other_groups():
    seeds = set()
    for others in range(3):
        params = [torch.nn.Parameter(torch.ones(128)) for _ in range(others + 1)]
        params[-1].shared_embedding = True
        optimizer = CoatAdamW([{"params": [p]} for p in params])
        name_tied(types.SimpleNamespace(bit16_groups=[[p] for p in params], optimizer=optimizer))
        for p in params:
            p.grad = torch.ones(128)
        optimizer.step()
        seeds.add(optimizer.state[params[-1]]["coat_seed"])
    assert len(seeds) == 1
