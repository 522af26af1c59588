"""Engines whose master weights are BF16 weights and remainders."""

import copy

import torch

from tests.coat_dist.checkpoint.universal_runs import WithBuffer
from tests.coat_dist.deepspeed.zero_runs import BUCKETS

BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


class Given(torch.nn.Module):
    """Its gradients are what it is given, whatever its weights are. Parameter groups have another order than it."""

    def __init__(self):
        super().__init__()
        self.vector = torch.nn.Parameter(torch.randn(47))
        self.matrix = torch.nn.Parameter(torch.randn(61, 47))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.other = torch.nn.Parameter(torch.randn(33, 129))

    def forward(self, given):
        return sum((p * g).sum(dtype=torch.float32) for p, g in zip(self.parameters(), given, strict=True))


def build(settings, remainder=True, universal=False, model=WithBuffer, **more):
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    import coat_dist

    __compatible_ops__["deepspeed_shm_comm"] = False  # not built: gloo does
    torch.manual_seed(0)
    params = {"lr": 0.01, **({"master_weights": "bf16_remainder"} if remainder else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": BF16 if remainder else {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "CoatAdamW", "params": params},
        **({"checkpoint": {"load_universal": True}} if universal else {}),
        **copy.deepcopy(settings),
        **more,
    }
    config["zero_optimization"] = BUCKETS | config["zero_optimization"]
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=settings["zero_optimization"]["stage"] == 3):
        net = model()
    named = list(net.named_parameters())
    groups = coat_dist.param_groups([(n, p) for n, p in named if n != "scale"], 0.1)
    groups += [{"params": [net.scale], "moments": "fp32", "weight_decay": 0.0, "lr": 0.005}]
    return coat_dist.initialize(model=net, model_parameters=groups, config=config)[0]
