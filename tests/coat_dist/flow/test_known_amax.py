"""A gradient's amax comes from the kernel that wrote it, for the very tensor that it wrote, or not at all."""

import copy
import importlib
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from coat_dist.flow import TensorParallel, linear, norm_linear, norm_mlp
from coat_dist.flow.known_amax import known_amax, with_amax
from tests.support import run_ranks

from .common import ONE, Layer, settings

S, B, H = 12, 3, 64
CONFIG = settings()


def stream(x, layer, tp=ONE, between=lambda x: x):
    """Two layers around a residual stream, and ``between`` wherever a gradient can come with its amax."""
    for _ in range(2):
        y, alias = norm_linear(x, layer.norm, layer.weight, None, tp, CONFIG, residual=True)
        x = between(alias + linear(y, layer.back, tp, CONFIG))
        y, alias = norm_mlp(x, layer.norm, layer.fc1, layer.fc2, "swiglu", tp, CONFIG, residual=True)
        x = between(alias + y)
    return x


@pytest.fixture
def looked(monkeypatch):
    """How many gradients were looked through for their amax."""
    module, seen = importlib.import_module("coat_dist.flow.scaling"), []
    original = module.amax
    monkeypatch.setattr(module, "amax", lambda x: (seen.append(x.shape), original(x))[1])
    return seen


def run(layer, x, between=lambda x: x):
    out = stream(x, layer, between=between)
    used = [x, layer.norm_weight, layer.weight, layer.back, layer.fc1, layer.fc2]
    return torch.autograd.grad(out, used, torch.sin(torch.arange(out.numel())).view(out.shape).to(out.dtype))


def apart(monkeypatch, *args):
    """As :func:`run`, with every gradient looked through."""
    with monkeypatch.context() as patch:
        for module in ("linear", "mlp"):
            patch.setattr(importlib.import_module(f"coat_dist.flow.{module}"), "known_amax", lambda dy, tp: None)
        return run(*args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_a_stream_are_not_looked_through(dtype, looked, monkeypatch):
    layer, x = Layer.random(dtype=dtype), torch.randn(S, B, H, dtype=dtype, requires_grad=True)
    grads = run(layer, x)
    assert len(looked) == 2 + 1  # what a norm_linear's output receives, and what the last block does
    looked.clear()
    expected = apart(monkeypatch, layer, x)
    assert len(looked) == 2 + 4 and all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))


def hooked(hook):
    def between(x):
        x.register_hook(hook)
        return x

    return between


def in_place(g):
    g.mul_(64)


def through_a_view(g):
    g.view(-1).mul_(64)


CHANGES = {
    "in place": hooked(in_place),
    "through a view": hooked(through_a_view),
    "replaced": hooked(lambda g: g * 64),
    "another use": lambda x: x + x * 63,
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_change_are_looked_through(change, looked, monkeypatch):
    """By 64, which a stale amax would cut off."""
    between = CHANGES[change]
    layer, x = Layer.random(dtype=torch.bfloat16), torch.randn(S, B, H, dtype=torch.bfloat16, requires_grad=True)
    grads = run(layer, x, between)
    assert len(looked) == 2 + 4
    assert all(torch.equal(*pair) for pair in zip(grads, apart(monkeypatch, layer, x, between), strict=True))


def test_the_amax_is_of_one_object_in_one_state():
    dx, amax = torch.randn(5, 8), torch.tensor(3.0)
    assert with_amax(dx, None) is dx and known_amax(dx, ONE) is None
    assert with_amax(dx, amax) is dx and known_amax(dx, ONE) is amax
    assert known_amax(dx, SimpleNamespace(size=2)) is None  # ranks that sum in place leave no trace
    for other in (dx.clone(), dx.view(8, 5), dx[:2], copy.copy(dx), copy.deepcopy(dx), pickle.loads(pickle.dumps(dx))):
        assert known_amax(other, ONE) is None
    dx[0, 0] = 1e3
    assert known_amax(dx, ONE) is None
    assert known_amax(with_amax(dx, amax), ONE) is amax
    dx[0, 0] = 1e4
    changed = copy.deepcopy(dx)  # takes attributes with it, and begins with the version that dx had before
    assert changed._version == 1 and known_amax(changed, ONE) is None


def unnoticed(rank, world):
    """Gradients of a stream whose ranks sum in place between the blocks, as Megatron does; known or not."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            before = dy._version
            dist.all_reduce(dy)
            assert dy._version == before
            return dy

    torch.manual_seed(0)
    tp, layer, x = TensorParallel(dist.group.WORLD), Layer.random(), torch.randn(S, B, H, requires_grad=True)
    grads = []
    for take in (known_amax, lambda dy, tp: None):
        for module in ("linear", "mlp"):
            importlib.import_module(f"coat_dist.flow.{module}").known_amax = take
        out = stream(x, layer, tp, Sum.apply)
        grads.append(torch.autograd.grad(out.sin().sum(), [x, layer.fc2]))
    return all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_ranks_that_sum_in_place_between_blocks():
    assert all(run_ranks(2, unnoticed))
