"""A configuration with a "coat" block, a small model and some steps of its engine."""

import torch

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
REMAINDERS = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
NO_FLOW = {"activation": {"enabled": False}}


def settings(stage=2, lr=3e-3, **more):
    """A configuration in which CoatAdamW is named; ``more`` replaces or adds keys."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": lr}},
        "coat": NO_FLOW,
        **more,
    }


CONFIG = settings(coat={"optimizer": {"second_moment": "e5m2"}, **NO_FLOW}, **FP32)
CONFIG["optimizer"]["params"] |= {"betas": [0.9, 0.95], "weight_decay": 0.1}
PLAIN = {key: value for key, value in CONFIG.items() if key not in ("coat", "optimizer")}
"""Without a block and without an optimizer."""


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)
    )


def quiet_deepspeed():
    import logging

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def train(engine, rank, steps=6):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 64, generator=generator).bfloat16()
    losses = []
    for _ in range(steps):
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
