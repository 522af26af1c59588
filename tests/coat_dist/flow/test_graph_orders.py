"""Layers in whatever order a program runs them: with graphs, over a simulated pool, the numbers
are those without.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from coat_dist.flow.graphs import graph_pool
from coat_dist.flow.graphs.cuda_graphs import GraphedFunction
from tests.support import slow

from .simulated_graphs import simulate

WIDTH = 8


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Up to rounding: gradients of a tensor that several losses read are summed in another order,
    on which elements depend that nearly cancel. Memory that was overwritten is another number
    altogether.
    """
    return left.shape == right.shape and bool(
        (left - right).abs().max() <= 1e-9 * right.abs().max()
    )


def smooth(x, parameters):
    weight, bias = parameters
    y = torch.nn.functional.layer_norm(x, (WIDTH,)) @ weight + bias
    return x + y * torch.sigmoid(y)


def mixing(x, parameters):
    weight, bias = parameters
    return x + torch.softmax((x @ weight) @ x.transpose(-1, -2), -1) @ x * bias


def bent(x, parameters):
    weight, bias = parameters
    return torch.tanh(torch.cumsum(x @ weight, 0) * 0.1 + bias)


class Layers:
    """Some layers and a scale before them."""

    def __init__(self, seed: int, graphs: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = random.Random(seed)

        def parameter(*shape):
            return torch.nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4
            )

        self.functions = [draw.choice([smooth, mixing, bent]) for _ in range(3)]
        self.layers = [(parameter(WIDTH, WIDTH), parameter(WIDTH)) for _ in self.functions]
        self.scale = parameter(WIDTH)
        self.graphs = [GraphedFunction() for _ in self.functions] if graphs else None

    def parameters(self):
        return [self.scale, *(p for pair in self.layers for p in pair)]

    def __call__(self, x, order, detached):
        """What each of the layers in ``order`` gives; an input that is ``detached`` gets no
        gradient.
        """
        x, outs = x * self.scale, []
        for place, i in enumerate(order):
            if i is None:
                raise OSError("in the middle")
            call = self.functions[i] if self.graphs is None else self.graphs[i]
            given = x.detach() if place in detached else x
            x = (
                call(given, self.layers[i])
                if self.graphs is None
                else call(self.functions[i], given, self.layers[i])
            )
            outs.append(x)
        return outs


class Both:
    """The same done to layers without and with graphs."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.models = [Layers(seed, graphs) for graphs in (False, True)]

    def losses(self, seed, tokens=3, order=(0, 1, 2), detached=(), of=None):
        """The sum of the outputs ``of`` these places in the order, or of the last; None where a
        layer raised.
        """
        found = []
        for model in self.models:
            x = torch.randn(
                tokens, 2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
            try:
                outs = model(x, order, detached)
            except OSError:
                found.append(None)
                continue
            found.append(sum((outs[i] * outs[i]).sin().sum() for i in of or [len(outs) - 1]))
        if found[0] is not None:
            assert same(*found)
        return None if None in found else found

    def backward(self, losses, may_fail=False):
        if losses is None or not losses[0].requires_grad:
            return
        plain, graphed = losses
        plain.backward()
        try:
            graphed.backward()
        except RuntimeError as problem:
            assert may_fail and "ran twice, or after that of a layer before it" in str(problem)
            self.clear()
        self.check()

    def check(self):
        for plain, graphed in zip(*(model.parameters() for model in self.models), strict=True):
            assert same(plain, graphed)
            assert (plain.grad is None) == (graphed.grad is None)
            assert plain.grad is None or same(plain.grad, graphed.grad)

    def clear(self):
        self.each(lambda p: setattr(p, "grad", None))

    def each(self, change, layers=None):
        for model in self.models:
            chosen = (
                model.parameters()
                if layers is None
                else [p for i in layers for p in model.layers[i]]
            )
            with torch.no_grad():
                for p in chosen:
                    change(p)

    def step(self):
        draw = self.draw
        order = draw.choice(
            [(0, 1, 2)] * 6 + [(0, 2), (1, 2), (2, 1, 0), (0, 1, 2, 1), (0, None, 2)]
        )
        detached = draw.choice([()] * 8 + [(1,), (0,), (1, 2)])
        places = range(len(order))
        of = draw.choice([None] * 5 + [[draw.choice(places)], [*places]])
        some = dict(
            seed=draw.randrange(2**30),
            tokens=draw.choice([3, 3, 3, 5, 2]),
            order=order,
            detached=detached,
            of=of,
        )
        what = draw.choice(
            ["train"] * 8 + ["drop", "two", "two", "freeze", "move", "sgd", "sgd", "evaluate"]
        )
        if what == "train":
            for _ in range(draw.choice([1, 2, 3])):
                self.backward(self.losses(**some))
        elif what == "drop":
            self.losses(**some)
        elif what == "two":
            pairs = [
                self.losses(**some),
                self.losses(draw.randrange(2**30), tokens=draw.choice([3, 5])),
            ]
            for pair in draw.sample(pairs, 2):
                self.backward(pair, may_fail=True)
        elif what == "freeze":
            kept = draw.random() < 0.5
            self.each(lambda p: p.requires_grad_(kept), [draw.randrange(3)])
            self.clear()
        elif what == "move":
            self.each(
                lambda p: setattr(p, "data", p.data * 1.01),
                draw.choice([[0, 1, 2], [draw.randrange(3)]]),
            )
        elif what == "sgd":
            self.each(lambda p: None if p.grad is None else p.sub_(0.05 * p.grad.clamp(-1, 1)))
            self.clear()
        else:
            with torch.no_grad():
                self.losses(**some)


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch):
    simulate(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pool():
    (found,) = graph_pool._pools.values()
    return found


def settles(both) -> None:
    """After some steps all layers run as graphs, and none is captured any more."""
    both.each(lambda p: p.requires_grad_(True))
    both.clear()
    for seed in range(8):
        both.backward(both.losses(seed))
        if seed == 5:
            before = pool().captured
    if max(graphs._captures for graphs in both.models[1].graphs) < 32:
        assert pool().captured == before and all(graphs._graphs for graphs in both.models[1].graphs)


@pytest.mark.parametrize("seed", [*range(8), *map(slow, range(8, 24))])
def test_graphed_functions_in_any_order(seed):
    both = Both(seed)
    for _ in range(30):
        both.step()
    settles(both)
    assert pool().arena.used_again > 50


def test_graphed_functions_with_losses_of_parts_in_turns():
    """A backward that is captured while the layer below waits for none may not take that one's
    memory.
    """
    both = Both(1)
    for seed, of in enumerate([[0]] * 3 + [[1]] * 2 + [[0, 1]] * 4):
        both.clear()
        both.backward(both.losses(seed, order=(0, 1), detached=(1,), of=of))
    settles(both)


@pytest.mark.parametrize("when", range(4))
def test_graphed_function_stepped_before_backward_is_captured(when):
    both = Both(2)
    for seed in range(5):
        losses = both.losses(seed)
        if seed != when:
            both.backward(losses)
        del losses
        both.each(lambda p: None if p.grad is None else p.sub_(0.05 * p.grad))
        both.clear()
    settles(both)


def test_simulated_graphs_see_what_is_overwritten(monkeypatch):
    """Graphs that do not look at who waits give other numbers."""
    monkeypatch.setattr(
        "coat_dist.flow.graphs.cuda_graphs._Graph._waits_as_before", lambda self: True
    )
    monkeypatch.setattr(graph_pool.Waiting, "finish", lambda self, one: None)
    both = Both(3)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(6):
            first, second = both.losses(seed), both.losses(seed + 50)
            both.backward(second)
            both.backward(first)
