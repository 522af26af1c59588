"""Engines whose master weights are BF16 weights and remainders."""

import copy

import torch

from tests.coat_dist.checkpoint.universal_runs import WithBuffer
from tests.coat_dist.checkpoint.universal_runs import build as build_engine
from tests.coat_dist.deepspeed.zero_runs import BUCKETS

BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


class Given(torch.nn.Module):
    """Its gradients are what it is given, whatever its weights are. Parameter groups have
    another order than it.
    """

    def __init__(self):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.randn(47))
        self.matrix = torch.nn.Parameter(torch.randn(61, 47))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.other = torch.nn.Parameter(torch.randn(33, 129))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, given):
        return sum(
            (p * g).sum(dtype=torch.float32) for p, g in zip(self.parameters(), given, strict=True)
        )


def build(settings, remainder=True, universal=False, model=WithBuffer, **more):
    params = {"lr": 0.01, **({"master_weights": "bf16_remainder"} if remainder else {})}
    config = {
        "bf16": BF16 if remainder else {"enabled": True},
        "optimizer": {"type": "CoatAdamW", "params": params},
    }
    config |= copy.deepcopy(settings) | more
    config["zero_optimization"] = BUCKETS | config["zero_optimization"]
    return build_engine(config, universal, model)
