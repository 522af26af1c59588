"""A DeepSpeed configuration with a "coat" block."""

import copy

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "CoatAdamW", "params": {"lr": 3e-4}},
    "coat": {
        "optimizer": {
            "first_moment": "e4m3",
            "second_moment": "e4m3",
            "expand": True,
            "group_size": 128,
        },
        "activation": {
            "enabled": True,
            "forward": "exact",
            "forward_scales": "row",
            "format": "e4m3",
            "grad_format": "e4m3",
            "saved_format": "mixed",
            "group_size": 32,
            "scale": "e8m0",
            "fp8_gather": True,
            "tp_invariant": False,
            "weights": "on_use",
            "wgrad": "grad",
            "attention": "bf16",
            "loss": "chunked",
            "z_loss": 0.0,
            "bf16_layers": [0, -1],
        },
    },
}


def config(changes):
    """A copy of BASE with other values at dotted keys; ``...`` removes a key."""
    made = copy.deepcopy(BASE)
    for key, value in changes.items():
        *path, last = key.split(".")
        block = made
        for part in path:
            block = block.setdefault(part, {})
        if value is ...:
            block.pop(last, None)
        else:
            block[last] = copy.deepcopy(value)
    return made
