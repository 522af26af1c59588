"""A small engine for tests of saving: built, stepped, its weights, and what lies in a folder."""

from pathlib import Path

import torch

ONE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 0.01}},
}


def small(config, net=None):
    import deepspeed

    import coat_dist

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    return coat_dist.initialize(model=net or torch.nn.Linear(128, 128), config={**ONE, **config})[0]


def step(engine):
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 128, dtype=dtype)).float().square().mean())
    engine.step()


def weights(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


def listed(folder):
    return sorted(p.name for p in Path(folder).iterdir() if not p.name.startswith("zero_to_"))


class Killed(BaseException):
    pass


def fail(*args):
    raise KeyError("of one rank")
