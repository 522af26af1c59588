"""Inputs for the AdamW kernel's tests, in every variant of the step."""

from dataclasses import replace

import torch

from coat_dist.reference.adamw import AdamWStep, AdamWTensors
from coat_dist.reference.moments import Moment, MomentCodec, decode, encode

NUMBERS = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
VARIANTS = {
    "default": {},
    "e5m2": {"m": "e5m2", "v": "e5m2"},
    "mixed": {"m": "e5m2"},
    "no expansion": {"expand": False},
    "groups of 64": {"size": 64},
    "groups of 256": {"size": 256},
    "maximize": {"numbers": replace(NUMBERS, maximize=True)},
    "bf16": {"param": torch.bfloat16, "grad": torch.bfloat16},
    "fp16, bf16 gradient": {"param": torch.float16, "grad": torch.bfloat16},
    "bf16 gradient": {"grad": torch.bfloat16},
    "stochastic": {"seed": 7},
    "stochastic, e5m2, large seed": {"seed": 2**32 - 5, "m": "e5m2", "v": "e5m2"},
    "int8, log8": {"m": "int8", "v": "log8"},
    "int8, log8, stochastic": {"m": "int8", "v": "log8", "seed": 7},
    "int8, log8, groups of 64": {"m": "int8", "v": "log8", "size": 64},
    "int8 without expansion": {"m": "int8", "expand": False},
    "int8, e5m2": {"m": "int8", "v": "e5m2"},
    "e4m3, log8, second moment stochastic": {
        "v": "log8",
        "seed": 11,
        "numbers": replace(NUMBERS, stochastic=(False, True)),
    },
    "second moment stochastic": {"seed": 7, "numbers": replace(NUMBERS, stochastic=(False, True))},
    "lr tensor": {"lr": "tensor"},
    "gradient factor": {"factor": 0.37},
    "remainder": {"param": torch.bfloat16, "grad": torch.bfloat16, "low": True},
    "remainder, copy, stochastic": {
        "param": torch.bfloat16,
        "low": True,
        "copy": torch.bfloat16,
        "seed": 9,
    },
    "copy": {"copy": torch.bfloat16},
    "fp16 copy": {"copy": torch.float16, "grad": torch.float16},
    "normalized": {"normalize": True},
    "normalized, stochastic": {
        "normalize": True,
        "seed": 2**32 - 1,
        "numbers": replace(NUMBERS, step=13),
    },
    "normalized, e5m2, groups of 64": {"normalize": True, "m": "e5m2", "v": "e5m2", "size": 64},
    "normalized, int8, log8": {"normalize": True, "m": "int8", "v": "log8"},
    "normalized, int8, log8, stochastic": {
        "normalize": True,
        "m": "int8",
        "v": "log8",
        "seed": 7,
        "size": 256,
    },
    "normalized, no expansion": {"normalize": True, "expand": False},
    "normalized, remainder, copy, stochastic": {
        "normalize": True,
        **{"param": torch.bfloat16, "low": True, "copy": torch.bfloat16, "seed": 9},
    },
}


def problem(
    n,
    device="cpu",
    m="e4m3",
    v="e4m3",
    expand=True,
    size=128,
    param=torch.float32,
    grad=torch.float32,
    spread=3.0,
    normalize=False,
    **_,
):
    """Random parameters, gradients and moments; groups that are zero, constant, or hold one huge
    element.

    ``normalize``: as the optimizer stores moments, first ones over the root of second ones, whose
    groups keep grids.
    """
    g = torch.Generator().manual_seed(n)
    scale = torch.exp(spread * torch.randn(n, generator=g))
    values = [torch.randn(n, generator=g) * s for s in (1.0, scale.clamp(max=1e4), scale)]
    values.append((torch.randn(n, generator=g) * scale).square())
    for x in values[1:]:
        x[::17] = 0
        x[size : 2 * size] = 0
        x[2 * size : 3 * size] = 0.37
        x[3 * size : 3 * size + 1] = 3e4
    codec_m = MomentCodec(m, expand, size, over_root=normalize)
    codec_v = MomentCodec(v, expand, size, keep_nonzero=True, keep_grid=normalize)
    second = encode(values[3], codec_v)
    first = encode(values[2], codec_m, second=decode(second, codec_v, n) if normalize else None)
    m_, v_ = (Moment(*(t.to(device) for t in x)) for x in (first, second))
    return [values[0].to(device, param), values[1].to(device, grad), m_, v_, codec_m, codec_v]


def extras(n, device="cpu", low=False, copy=None, **_):
    """Keyword arguments of a step: remainders at random, and a copy full of garbage."""
    g = torch.Generator().manual_seed(n + 1)
    found = {}
    if low:
        found["low"] = torch.randint(-(2**15), 2**15, (n,), generator=g).to(torch.int16).to(device)
    if copy is not None:
        found["copy"] = torch.full((n,), 7.0, dtype=copy, device=device)
    return found


def one_step(
    side, param, grad, first, second, first_codec, second_codec, numbers, seed=None, **more
):
    """A step on one tensor by ``side``, the module of kernels or of definitions; ``more`` as
    :func:`extras` gives.
    """
    one = AdamWTensors(param, grad, first, second, seed, **more)
    side.adamw_steps([one], first_codec, second_codec, numbers)


def clone(arguments):
    def one(x):
        return (
            Moment(*map(one, x))
            if isinstance(x, Moment)
            else x.clone()
            if isinstance(x, torch.Tensor)
            else x
        )

    return [one(x) for x in arguments]
