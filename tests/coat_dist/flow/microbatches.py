"""What the tests of wgrad and of cached weights share: micro-batches, ways to run backward."""

import torch
from torch.utils.checkpoint import checkpoint

WEIGHTS = ("weight", "back", "fc1", "fc2")


def with_main_grad(layer, dtype, ddp=True):
    for name in WEIGHTS:
        parameter = getattr(layer, name)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype)
        if ddp:
            parameter.grad_added_to_main_grad = False
    return layer


def batches(n, dtype=torch.float32, h=64):
    return [torch.randn(6, 4, h).to(dtype) for _ in range(n)]


def backward(layer, x, config, wrap=lambda f, x: f(x)):
    x = x.detach().requires_grad_()
    out = wrap(lambda t: layer.flow(t, config), x)
    out.backward(torch.sin(torch.arange(out.numel())).view(out.shape).to(out.dtype))
    return x.grad


def replayed(kind):
    if kind == "offload":

        def call(f, x):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.detach().clone(), lambda t: t
            ):
                return f(x)

        return call
    if kind == "plain":
        return lambda f, x: f(x)
    return lambda f, x: checkpoint(f, x, use_reentrant=kind == "reentrant")


REPLAYS = ["plain", "reentrant", "non-reentrant", "offload"]
