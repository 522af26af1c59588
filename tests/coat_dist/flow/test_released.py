"""Backward drops what it has used before it makes the next large tensor: a step's peak is in
these functions.
"""

from __future__ import annotations

import importlib
import weakref

import pytest
import torch

from coat_dist.config import ActivationConfig
from coat_dist.flow import Heads, Norm, TensorParallel, linear, norm_mlp, norm_qkv, rope_table
from coat_dist.flow.core.weights import Weight

H, F, TOKENS = 64, 96, 32
ONE = TensorParallel()


class Watch:
    """Weak references to what functions were given and made, and which of them live at each
    weight's gradient.
    """

    def __init__(self, monkeypatch) -> None:
        self.made: dict[str, weakref.ref] = {}
        self.alive: list[set[str]] = []
        original = Weight.gradients

        def gradient(weight, *operands):
            self.alive.append({name for name, t in self.made.items() if t() is not None})
            return original(weight, *operands)

        monkeypatch.setattr(Weight, "gradients", gradient)

    def around(
        self, monkeypatch, module: str, function: str, given: dict[int, str], made: dict[int, str]
    ) -> None:
        where = importlib.import_module(f"coat_dist.flow.{module}")
        original = getattr(where, function)

        def watched(*args, **kwargs):
            results = original(*args, **kwargs)
            for source, names in ((args, given), (results, made)):
                for i, name in names.items():
                    t = source[i]
                    self.made[name] = weakref.ref(t if isinstance(t, torch.Tensor) else t.codes)
            return results

        monkeypatch.setattr(where, function, watched)


@pytest.fixture(params=["row", "tensor"])
def config(request):
    return ActivationConfig(forward_scales=request.param)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def weight(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 0.1).requires_grad_()


def test_norm_mlp_releases_operands_before_wgrad(watch, config, monkeypatch) -> None:
    watch.around(monkeypatch, "blocks.mlp", "quantize_gradient", {}, {0: "dout8", 1: "dout8_t"})
    watch.around(
        monkeypatch, "blocks.mlp", "activation_backward", {0: "da"}, {0: "d8", 1: "d8_t", 2: "a8_t"}
    )
    norm = Norm("rmsnorm", 1e-5, weight(H))
    x = torch.randn(TOKENS, H, requires_grad=True)
    norm_mlp(
        x, norm, weight(2 * F, H), weight(H, F), "swiglu", ONE, config
    ).square().sum().backward()
    assert watch.alive == [{"dout8_t", "d8", "d8_t", "a8_t"}, {"d8_t"}]


def test_norm_qkv_releases_operands_before_wgrad(watch, config, monkeypatch) -> None:
    names = {0: "d8", 1: "d8_t"}
    watch.around(
        monkeypatch, "blocks.linear", "quantize_gradient", {0: "gradients together"}, names
    )
    heads, table = Heads(2, 1, H // 2), rope_table(torch.randn(TOKENS, 1, 1, H // 2))
    norm = Norm("rmsnorm", 1e-5, weight(H))
    x = torch.randn(TOKENS, 1, H, requires_grad=True)
    parts = norm_qkv(x, norm, weight(3 * H, H), weight(3 * H), heads, table, ONE, config)
    sum(p.square().sum() for p in parts).backward()
    assert watch.alive == [{"d8_t"}]


def test_linear_releases_operands_before_wgrad(watch, config, monkeypatch) -> None:
    watch.around(monkeypatch, "blocks.linear", "quantize_gradient", {}, {0: "d8", 1: "d8_t"})
    linear(
        torch.randn(TOKENS, H, requires_grad=True), weight(H, H), ONE, config
    ).square().sum().backward()
    assert watch.alive == [{"d8_t"}]
