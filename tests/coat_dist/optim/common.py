"""An optimizer on one parameter, steps with random gradients, and states compared to the byte."""

import torch

from coat_dist.optim import CoatAdamW, plan


def make(n=300, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(n).to(dtype))
    return p, CoatAdamW([p], **{"lr": 0.01, **options})


def no_plans(monkeypatch):
    """Steps check everything."""
    monkeypatch.setattr(plan.Plans, "learn", lambda *_: None)


def train(optimizer, params, steps, seed=1):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        optimizer.step()


def equal_bytes(a, b):
    """On any devices."""
    one, other = (x.detach().cpu().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)


def assert_same_state(a, b):
    assert len(a.state) == len(b.state)
    for one, other in zip(a.state.values(), b.state.values(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert (
                equal_bytes(value, other[key])
                if isinstance(value, torch.Tensor)
                else value == other[key]
            ), key
