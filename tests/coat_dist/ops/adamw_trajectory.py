"""Many steps of the AdamW kernel beside torch's fp32 AdamW."""

import math

import torch

from benchmarks.accuracy.encodings import RangedCodec
from benchmarks.accuracy.trajectories import ratios
from benchmarks.accuracy.trajectory_gradients import stopped
from coat_dist.kernels import adamw as kernels
from coat_dist.reference.adamw import AdamWStep
from coat_dist.reference.moments import MomentCodec

from .adamw_problems import one_step

SECOND = {"e4m3": "e4m3", "e5m2": "e5m2", "int8": "log8"}
ERROR = {"e4m3": 0.4, "e5m2": 0.25, "int8": 0.8}
"""As for the definition, in tests/coat_dist/optim/test_trajectories.py."""


def check(first, size, stochastic, device="cpu", n=1024, steps=40):
    """Elements whose gradients stop end where fp32 AdamW leaves them, and with R = 2 F**2 they do not."""
    right = _ratios(MomentCodec(first, group_size=size), stochastic, device, n, steps)
    assert right["error"] <= ERROR[first] and abs(right["moved"] - 1) <= 0.3, right
    if first != "int8":
        wide = RangedCodec(first, group_size=size, log2_range=math.log2(2 * MomentCodec(first).max ** 2))
        wrong = _ratios(wide, stochastic, device, n, steps)
        assert wrong["error"] > ERROR[first], wrong


def _ratios(codec, stochastic, device, n, steps):
    second = MomentCodec(SECOND[codec.format], group_size=codec.group_size, keep_nonzero=True)
    gradients = stopped(n, steps=steps)
    p = torch.zeros(n, device=device)
    m, v = codec.zeros(n, device), second.zeros(n, device)
    exact = torch.nn.Parameter(torch.zeros(n))
    optimizer = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0)
    for step, gradient in enumerate(gradients.steps, 1):
        numbers = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.0, step, stochastic=stochastic)
        one_step(kernels, p, gradient.to(device), m, v, codec, second, numbers, seed=2654435761 * step % 2**32)
        exact.grad = gradient.clone()
        optimizer.step()
    return ratios(*(x[gradients.watched].double() for x in (p.cpu(), exact.detach())))
